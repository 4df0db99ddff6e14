"""Types of values, stricter than pydantic's: a switch accepts only bools, 0 and 1, a text accepts no number, and each
error says what is expected. :class:`Section` is the base of all models of the configuration.
"""

from __future__ import annotations

import enum
import math
import numbers
import os
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from patrickstar.sizes import parse_size


class Section(BaseModel):
    """A section of the configuration: immutable, without unknown keys; the text under each field is its description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


def unexpected(text: str) -> PydanticCustomError:
    """The error of a value; ``text`` follows "<key> is <value>; " in the message."""
    return PydanticCustomError("unexpected", "{text}", {"text": text})


def parse_bytes(value: int | str, name: str) -> int:
    """Bytes of an integer or a string such as ``"24GiB"``, ``"1.5 GB"`` or ``"4096"``.

    Raises:
        ValueError: ``value`` is not a positive amount of memory.
    """
    num_bytes = _num_bytes(value)
    if num_bytes is None:
        raise ValueError(f"{name} is {value!r}; {_GIVE_BYTES}")
    return num_bytes


_MOST = 2**62  # fits the core's 64 bits, with headroom for sums
_GIVE_BYTES = f'give bytes as a positive integer or a string such as "24GiB" or "500MB", at most {_MOST}'


def _num_bytes(value: Any) -> int | None:
    if isinstance(value, str):
        value = parse_size(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 < value <= _MOST:
        return None
    return int(value)


def _memory(value: Any) -> int:
    num_bytes = _num_bytes(value)
    if num_bytes is None:
        raise unexpected(_GIVE_BYTES)
    return num_bytes


def _switch(value: Any) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise unexpected("it is a switch, give True or False")
    return bool(value)


_NUMERAL = re.compile(r"[+-]?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][+-]?[0-9]{1,3})?", re.ASCII)


def _unquoted(value: Any) -> Any:
    """The number in a text such as ``"1e-4"``, which YAML leaves a text; any other value is unchanged."""
    if not isinstance(value, str) or _NUMERAL.fullmatch(value) is None:
        return value
    return float(value) if any(sign in value for sign in ".eE") else int(value)


def _integer(value: Any) -> int:
    """Accepts 5e8 too, which JSON reads as a float."""
    value = _unquoted(value)
    whole = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole:
        raise unexpected("give an integer")
    if not -_MOST <= value <= _MOST:
        raise unexpected(f"give an integer of at most {_MOST}")
    return int(value)


def _number(value: Any) -> float:
    value = _unquoted(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise unexpected("give a finite number")
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction beyond a float's range
        number = math.inf
    if not math.isfinite(number):
        raise unexpected("give a finite number")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise unexpected("give a string")
    return value


def _path(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise unexpected("give a path")
    return str(os.fspath(value))


def _switch_or_path(value: Any) -> bool | str:
    if isinstance(value, int):
        return _switch(value)
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise unexpected("give True, False or a path")
    return str(os.fspath(value))


def _pair(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise unexpected("give two numbers, such as (0.9, 0.999)")
    return tuple(value)


def _per_group(value: Any) -> float | tuple[float, ...]:
    return tuple(_number(item) for item in value) if isinstance(value, (tuple, list)) else _number(value)


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise unexpected("give a list of names")
    return tuple(names)


def _data_type(value: Any) -> Any:
    name = (
        str(value).removeprefix("torch.").lower()
        if isinstance(value, (str, DataType)) or type(value).__module__ == "torch"
        else None
    )
    return next((member for member in DataType if name in _DATA_TYPE_NAMES[member]), value)


class DataType(enum.Enum):
    """A floating point type, by any of its usual names."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


_DATA_TYPE_NAMES = {
    DataType.FP32: ("datatype.fp32", "fp32", "float32", "float"),
    DataType.FP16: ("datatype.fp16", "fp16", "float16", "half"),
    DataType.BF16: ("datatype.bf16", "bf16", "bfloat16"),
}


def ignoring_case(choices: type[enum.Enum]) -> Callable[[Any], Any]:
    """For a ``BeforeValidator``: the member of ``choices`` whose value equals the given one, ignoring case."""

    def find(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return next((member for member in choices if member.value.lower() == value.lower()), value)

    return find


Switch = Annotated[bool, BeforeValidator(_switch)]
Integer = Annotated[int, BeforeValidator(_integer)]
AtLeast0 = Annotated[Integer, Field(ge=0)]
AtLeast1 = Annotated[Integer, Field(ge=1)]
Number = Annotated[float, BeforeValidator(_number)]
NonNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(gt=0, le=1)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
DecayRate = Annotated[Number, Field(ge=0, lt=1)]
Betas = Annotated[tuple[DecayRate, DecayRate], BeforeValidator(_pair)]
PerGroup = Annotated[float | tuple[float, ...], BeforeValidator(_per_group)]
Text = Annotated[str, BeforeValidator(_text)]
FilePath = Annotated[str, BeforeValidator(_path)]
SwitchOrPath = Annotated[bool | str, BeforeValidator(_switch_or_path)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
FloatType = Annotated[DataType, BeforeValidator(_data_type)]
OffloadDevice = Literal["none", "cpu", "nvme"]
ZeroStage = Annotated[Integer, Field(ge=0, le=3)]
TagValidation = Annotated[
    Literal["WARN", "IGNORE", "FAIL"],
    BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
]
Memory = Annotated[
    int, BeforeValidator(_memory), WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]})
]
Anything = Annotated[Any, WithJsonSchema({})]

"""Exact conversion of users' state to JSON and back.

Beyond JSON's types it handles tuples, counters, dicts with keys other than strings, and numbers that are not finite;
learning-rate schedulers keep all of these. Tensors are kept beside the JSON, in a list. The data cannot name code: no
pickle, no class, no import.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from patrickstar.checkpoint.errors import CheckpointError

_TUPLE, _ITEMS, _COUNTER, _FLOAT, _TENSOR = "$tuple", "$items", "$counter", "$float", "$tensor"


def encode(value: Any, what: str, tensors: list[torch.Tensor] | None = None) -> Any:
    """``value`` in JSON's types.

    Args:
        value: None, bools, ints, floats, strings, and lists, tuples, dicts and counters of these.
        what: names it in errors.
        tensors: receives the tensors in ``value``; the JSON has their indices. None: tensors are refused.

    Raises:
        CheckpointError: an item is of another type; the message says where.
    """
    try:
        return _encode(value, what, tensors)
    except RecursionError:
        raise CheckpointError(f"{what} contains itself, or is nested too deeply; give plain values") from None


def _encode(value: Any, what: str, tensors: list[torch.Tensor] | None) -> Any:
    if tensors is not None and isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if type(value) is list:
        return [_encode(item, f"{what}[{index}]", tensors) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {_TUPLE: [_encode(item, f"{what}[{index}]", tensors) for index, item in enumerate(value)]}
    if type(value) is Counter:
        return {_COUNTER: _encode_items(value, what, tensors)}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encode(item, f"{what}[{key!r}]", tensors) for key, item in value.items()}
        return {_ITEMS: _encode_items(value, what, tensors)}
    raise CheckpointError(
        f"{what} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint does not hold; give "
        "numbers, strings, bools, None, or lists, tuples and dicts of these (of a tensor or an array: .tolist())"
    )


def _encode_items(value: dict[Any, Any], what: str, tensors: list[torch.Tensor] | None) -> list[Any]:
    return [
        [_encode(key, f"a key of {what}", None), _encode(item, f"{what}[{key!r}]", tensors)]
        for key, item in value.items()
    ]


def decode(value: Any, what: str, tensors: Sequence[torch.Tensor] = ()) -> Any:
    """Inverse of :func:`encode`.

    Args:
        value: the JSON.
        what: names it in errors.
        tensors: the list that :func:`encode` filled.

    Raises:
        CheckpointError: ``value`` is malformed.
    """
    try:
        return _decode(value, tensors)
    except (TypeError, ValueError, IndexError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"{what} in the checkpoint is nothing that was saved: {error}") from error


def _decode(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(item, tensors) for key, item in value.items()}
    if len(value) != 1:
        raise ValueError(f"{tag} has neighbours")
    content = value[tag]
    if tag == _FLOAT:
        if content not in ("nan", "inf", "-inf"):
            raise ValueError(f"{content!r} is no such number")
        return float(content)
    if tag == _TENSOR:
        if type(content) is not int or content < 0:
            raise ValueError(f"{content!r} is no index of a tensor")
        return tensors[content]
    if not isinstance(content, list):
        raise ValueError(f"{tag} holds no list")
    if tag == _TUPLE:
        return tuple(_decode(item, tensors) for item in content)
    if tag in (_ITEMS, _COUNTER):
        items = {_decode(key, ()): _decode(item, tensors) for key, item in content}
        return items if tag == _ITEMS else Counter(items)
    raise ValueError(f"the tag {tag!r} is unknown")

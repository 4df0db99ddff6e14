"""Options of a parameter group and states of a parameter, by type of optimizer and PyTorch's names. All code that lists
options or states uses this table; a new type is a new row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from patrickstar.choices import OptimizerType
from patrickstar.config.optimizer import OptimizerParams
from patrickstar.config.shown import shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """One type of optimizer, or several that share these properties."""

    options: tuple[str, ...]
    """Options of a parameter group."""
    params: tuple[str, ...]
    """Further keys of ``optimizer.params`` that it acts on."""
    states: tuple[str, ...]
    """States of a parameter, beside ``step``."""
    classes: str
    """Classes whose state dicts it accepts, in words."""
    lacks: str
    """Text after the name of another optimizer's option or state."""
    says_step: bool
    """True if PyTorch's state of a parameter has a step count."""


_ADAM = UpdateRule(
    options=("lr", "betas", "eps", "weight_decay"),
    params=("adam_w_mode", "torch_adam", "bias_correction"),
    states=("exp_avg", "exp_avg_sq"),
    classes="torch.optim.Adam or AdamW",
    lacks="which neither Adam nor AdamW has",
    says_step=True,
)
_RULES = {
    OptimizerType.ADAM: _ADAM,
    OptimizerType.ADAMW: _ADAM,
    OptimizerType.LION: UpdateRule(
        options=("lr", "betas", "weight_decay"),
        params=(),
        states=("exp_avg",),
        classes="an optimizer of type Lion",
        lacks="which Lion does not have",
        says_step=False,
    ),
    OptimizerType.SGD: UpdateRule(
        options=("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        params=(),
        states=("momentum_buffer",),
        classes="torch.optim.SGD",
        lacks="which SGD does not have",
        says_step=False,
    ),
}

ALL_OPTIONS: tuple[str, ...] = tuple(dict.fromkeys(option for rule in _RULES.values() for option in rule.options))
"""The options of all types."""
_OF_SOME_TYPES = {*ALL_OPTIONS, *(key for rule in _RULES.values() for key in rule.params)}
_LION_BETAS = (0.9, 0.99)


def rule_of(kind: OptimizerType) -> UpdateRule:
    """The rule of a type of optimizer."""
    return _RULES[kind]


def group_options(kind: OptimizerType, options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The options of a parameter group, as plain numbers; one-element tensors are accepted, as in PyTorch.

    Raises:
        ValueError: one is missing, no number, or outside ``torch.optim``'s range; ``name`` says whose it is.
    """
    found = {key: _CHECKS.get(key, _not_negative)(options.get(key), f"{name}.{key}") for key in rule_of(kind).options}
    if found.get("nesterov") and (found["momentum"] == 0 or found["dampening"] != 0):
        raise ValueError(
            f"{name} has nesterov=True with momentum {found['momentum']:g} and dampening {found['dampening']:g}; give "
            "a momentum above 0 and no dampening, or leave nesterov out"
        )
    return found


def with_own_defaults(kind: OptimizerType, params: OptimizerParams) -> OptimizerParams:
    """``optimizer.params`` with the type's own defaults where they differ from Adam's."""
    if kind is OptimizerType.LION and "betas" not in params.model_fields_set:
        return params.model_copy(update={"betas": _LION_BETAS})
    return params


def conflicts_of_params(kind: OptimizerType, params: OptimizerParams) -> list[str]:
    """One line for each key of ``optimizer.params`` that the type lacks, and for values that
    ``torch.optim`` refuses.
    """
    rule = rule_of(kind)
    fields = type(params).model_fields
    problems = [
        f"optimizer.params.{key} is {shown(getattr(params, key))}, {rule.lacks}; leave it out"
        for key in sorted(_OF_SOME_TYPES - {*rule.options, *rule.params, "adam_w_mode"})
        if key in params.model_fields_set and getattr(params, key) != fields[key].get_default()
    ]
    try:
        group_options(kind, params.model_dump(), "optimizer.params")
    except ValueError as error:
        problems.append(str(error))
    return problems


def _betas(value: Any, name: str) -> tuple[float, ...]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name} is {shown(value)}; give two numbers, such as (0.9, 0.999)")
    return tuple(_number(beta, f"{name}[{index}]", "less than 1", below=1.0) for index, beta in enumerate(value))


def _not_negative(value: Any, name: str) -> float:
    return _number(value, name, "finite", below=math.inf)


def _share(value: Any, name: str) -> float:
    return _number(value, name, "at most 1", below=math.nextafter(1.0, 2.0))


def _switch(value: Any, name: str) -> bool:
    if not isinstance(value, (bool, int)) or value not in (0, 1):
        raise ValueError(f"{name} is {shown(value)}; it is a switch, give True or False")
    return bool(value)


def _number(value: Any, name: str, limit: str, *, below: float) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not 0 <= number < below:
        raise ValueError(f"{name} is {shown(value)}; it must be a number of at least 0 and {limit}")
    return number


_CHECKS = {"betas": _betas, "dampening": _share, "nesterov": _switch}

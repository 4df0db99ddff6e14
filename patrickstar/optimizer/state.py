"""Checks an optimizer's groups and state dict completely before any of it is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from patrickstar.config import ALL_OPTIONS, OptimizerType, UpdateRule, group_options, rule_of

REFUSED_OPTIONS = {
    "amsgrad": "keeps the largest variance, which chunks have no room for",
    "maximize": "goes up the gradient; negate the loss instead",
    "differentiable": "runs the step through autograd, and chunks are updated outside of it",
}
"""Options of torch's groups that an engine cannot follow, with the reason."""
_OTHERS_OPTIONS = (
    *ALL_OPTIONS,
    *("alpha", "rho", "centered", "lambd", "momentum_decay", "lr_decay", "etas"),
    *("scale_parameter", "relative_step", "warmup_init"),
)
"""Group keys that reveal another type of optimizer; keys of the engine's own type are excluded."""
_MOST_STEPS = 2**53  # the largest exact count in float64


class CheckedState(NamedTuple):
    """A checked state dict."""

    entries: list[tuple[nn.Parameter, dict[str, Any]]]
    """Per parameter: ``step`` and the states of the optimizer's type, or an empty dict."""
    groups: list[dict[str, Any]]
    """The groups' options without ``params``."""


def check_no_refused_option(group: Mapping[str, Any], what: str) -> None:
    """Raises ValueError if a torch group has an option that an engine cannot follow."""
    for key, why in REFUSED_OPTIONS.items():
        if group.get(key):
            raise ValueError(f"{what} has {key}={group[key]!r}, which {why}; leave {key} out")


def checked_group(kind: OptimizerType, group: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Returns a group's options, with those of the optimizer's type as plain numbers.

    Raises:
        ValueError: an option is impossible, or an engine cannot follow it.
    """
    check_no_refused_option(group, what)
    return {**{key: value for key, value in group.items() if key != "params"}, **group_options(kind, group, what)}


def checked_state(
    kind: OptimizerType,
    state_dict: Any,
    param_groups: Sequence[Mapping[str, Any]],
    shape_of: Callable[[nn.Parameter], torch.Size],
) -> CheckedState:
    """Checks ``state_dict`` (torch's format, optimizer type ``kind``) against the parameters in ``param_groups``, whose
    states have the shapes ``shape_of``.

    Raises:
        ValueError: the format, the groups or the parameters differ, or a value is impossible.
    """
    rule = rule_of(kind)
    saved_groups = _saved_groups(state_dict, rule)
    saved_sizes, sizes = ([len(group["params"]) for group in groups] for groups in (saved_groups, param_groups))
    if saved_sizes != sizes:
        raise ValueError(
            f"the optimizer has groups of {sizes} parameters, the state dict of {saved_sizes}; "
            "build the engine with the same model_parameters"
        )
    for index, saved in enumerate(saved_groups):
        others = [key for key in _OTHERS_OPTIONS if key in saved and key not in rule.options]
        if others:
            raise ValueError(
                f"group {index} of the state dict has {others[0]}, {rule.lacks}; give the state of {rule.classes}"
            )
    groups = []
    for index, (saved, own) in enumerate(zip(saved_groups, param_groups, strict=True)):
        groups.append(checked_group(kind, {**own, **saved}, f"group {index} of the state dict"))
    entries = [
        (param, checked_entry(state_dict["state"].get(key), shape_of(param), f"state {key} of the state dict", rule))
        for group, saved in zip(param_groups, saved_groups, strict=True)
        for param, key in zip(group["params"], saved["params"], strict=True)
    ]
    return CheckedState(entries, groups)


def _saved_groups(state_dict: Any, rule: UpdateRule) -> list[Mapping[str, Any]]:
    give = f"give the state_dict() of {rule.classes}"
    kinds = {"state": Mapping, "param_groups": (list, tuple)}
    for key, kind in kinds.items():
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get(key), kind):
            raise ValueError(f"the optimizer's state dict has no {key}; {give}")
    for index, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise ValueError(f"group {index} of the state dict has no list params; {give}")
    return list(state_dict["param_groups"])


def checked_entry(entry: Any, shape: torch.Size, what: str, rule: UpdateRule) -> dict[str, Any]:
    """Checks one parameter's state, named ``what`` in errors; ``shape`` is the parameter's. Returns ``step`` and the
    states of ``rule``, or an empty dict if there are none.

    Raises:
        ValueError: a state is missing, or is impossible.
    """
    if entry is None or (isinstance(entry, Mapping) and all(value is None for value in entry.values())):
        return {}
    needed = (*(("step",) if rule.says_step else ()), *rule.states)
    missing = [key for key in needed if not isinstance(entry, Mapping) or key not in entry]
    if missing:
        raise ValueError(f"{what} has no {missing[0]}; give the state of {rule.classes}")
    for key in rule.states:
        value = entry[key]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.layout is not torch.strided:
            raise ValueError(f"{what}: {key} is {_described(value)}; give a dense tensor of floating point numbers")
        if value.is_meta:
            raise ValueError(f"{what}: {key} is on the meta device and has no values; load the file that holds them")
        if value.shape != shape:
            raise ValueError(f"{what}: {key} has shape {tuple(value.shape)}, its parameter {tuple(shape)}")
    step = entry.get("step", 1)  # PyTorch omits it: at least one step
    _check_step(step, what)
    step = step if isinstance(step, torch.Tensor) else torch.tensor(float(step), dtype=torch.float32, device="cpu")
    return {"step": step, **{key: entry[key] for key in rule.states}}


def _check_step(step: Any, what: str) -> None:
    try:
        number = float(step) if not isinstance(step, (str, bytes)) else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not (number.is_integer() and 0 <= number <= _MOST_STEPS):
        raise ValueError(f"{what}: step is {_described(step)}; give a whole number of steps, from 0 to {_MOST_STEPS}")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_meta):
        return f"a tensor of {value.dtype} of shape {tuple(value.shape)}"
    return f"{value!r:.100}"

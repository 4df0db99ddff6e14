"""Finds the layers of a model that repeat, so that a trace may leave most of them out (planning/repeated_uses.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from patrickstar.module.preprocess import SortedParams

_DIFFER = ("layer_idx", "_name")
"""Attributes in which layers that repeat may differ: their number, and the name of a tiled module."""
_GATHER = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Options with which a model's end reads results of all layers."""
_COMPARED = 2
"""Periods whose uses are compared."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """The part of a model whose layers may repeat. A model may treat layers by their number, unseen by the layers."""

    module: nn.Module
    num_treated_otherwise: int = 0
    """First layers of a list that the model treats unlike later ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repetition:
    """Layers of which each equals the one that is ``period`` layers earlier."""

    layers: nn.ModuleList
    params: list[list[int]]
    """By layer: the ids of its parameters."""
    first: int
    """First layer of the first period whose uses are compared."""
    period: int
    num_left_out: int
    """Periods that a trace leaves out."""

    @contextlib.contextmanager
    def shortened(self) -> Iterator[None]:
        """Context in which the last ``num_left_out`` periods are missing from the module."""
        end = len(self.layers) - self.num_left_out * self.period
        rest = list(self.layers)[end:]
        del self.layers[end:]
        try:
            yield
        finally:
            self.layers.extend(rest)


def find_repetition(stack: Stack, params: SortedParams) -> Repetition | None:
    """The repetition that leaves most parameters out; None: no layers repeat often enough."""
    module, begin = stack.module, stack.num_treated_otherwise
    configs = {id(config): config for child in module.modules() if (config := getattr(child, "config", None))}
    if any(getattr(config, key, False) is True for config in configs.values() for key in _GATHER):
        return None
    ids = {spec.param: index for index, spec in enumerate(params.chunked)}
    lists = (child for child in module.modules() if isinstance(child, nn.ModuleList))
    found = [repetition for layers in lists if (repetition := _repetition_of(layers, ids, begin)) is not None]
    return max(found, key=_numel_left_out, default=None)


def _repetition_of(layers: nn.ModuleList, ids: dict[nn.Parameter, int], least: int) -> Repetition | None:
    owned = [[ids[param] for param in layer.parameters() if param in ids] for layer in layers]
    num_owned = [len(params) for params in owned]
    if len(layers) <= _COMPARED or min(num_owned) == 0 or len(set().union(*owned)) < sum(num_owned):
        return None
    kinds = _kinds(layers)
    for period in range(1, len(kinds) // _COMPARED):
        begin = len(kinds) - period
        while begin > least and kinds[begin - 1] == kinds[begin - 1 + period]:
            begin -= 1
        # A period ahead of those compared keeps what a step makes once, such as masks: at best a whole one.
        for first in (begin + period, begin + 1):
            num_left_out = (len(kinds) - first - 1) // period - _COMPARED
            if num_left_out > 0:
                return Repetition(layers=layers, params=owned, first=first, period=period, num_left_out=num_left_out)
    return None


def _numel_left_out(repetition: Repetition) -> int:
    left_out = list(repetition.layers)[-repetition.num_left_out * repetition.period :]
    return sum(param.numel() for layer in left_out for param in layer.parameters())


def _kinds(layers: Sequence[nn.Module]) -> list[int]:
    """By layer a number, which equal layers share."""
    examples: list[nn.Module] = []
    kinds = []
    for layer in layers:
        kind = next((kind for kind, example in enumerate(examples) if _are_alike(example, layer)), len(examples))
        examples += [layer] if kind == len(examples) else []
        kinds.append(kind)
    return kinds


def _are_alike(a: nn.Module, b: nn.Module) -> bool:
    """True if both have the same classes, shapes and attributes, within the same tree."""
    ours, theirs = list(a.named_modules()), list(b.named_modules())
    return len(ours) == len(theirs) and all(
        name == other_name and _are_same(module, other) and _have_same_values(vars(module), vars(other))
        for (name, module), (other_name, other) in zip(ours, theirs, strict=True)
    )


def _have_same_values(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(key in _DIFFER or _are_same(value, b[key]) for key, value in a.items())


def _are_same(a: Any, b: Any) -> bool:
    """True if a module treats tokens alike with both attributes. Modules are compared by class alone."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.shape, a.dtype, a.requires_grad, a.device) == (b.shape, b.dtype, b.requires_grad, b.device)
    if isinstance(a, (bool, int, float, str, set, frozenset, torch.Size, torch.dtype, torch.device)):
        return bool(a == b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_are_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_are_same(value, b[key]) for key, value in a.items())
    if isinstance(a, nn.Module):
        return True
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and _are_same(a.__self__, b.__self__)
    if isinstance(a, functools.partial):
        return all(map(_are_same, (a.func, a.args, a.keywords), (b.func, b.args, b.keywords)))
    if isinstance(a, types.FunctionType) or not hasattr(a, "__dict__"):
        return False
    return _have_same_values(vars(a), vars(b))

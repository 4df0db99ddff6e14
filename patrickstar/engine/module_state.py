"""What a forward may change of a module beside parameters and buffers: attributes, and random number generators.

Attributes are a module's own: values that are assigned to it, and lists, dicts, sets and deques that it holds. Tensors
among them are watched by their versions. Other objects are not looked into.
"""

from __future__ import annotations

import collections
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
_MOST_CONTAINERS = 4096
_MOST_DEPTH = 3
_NOT_THE_USERS = (frozenset(nn.Module().__dict__) - {"training"}) | {"_compiled_call_impl"}


class ModuleState:
    """Of ``module`` and the modules inside it as they are now; ``params`` are its parameters that PyTorch keeps."""

    def __init__(self, module: nn.Module, params: Iterable[nn.Parameter]):
        self._owners = [(name or "the model", child.__dict__) for name, child in module.named_modules()]
        self._containers: dict[int, Any] = {}
        self._tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._generators: dict[int, Any] = {}
        for owner, attributes in self._owners:
            for name, value in attributes.items():
                if name not in _NOT_THE_USERS:
                    self._find(f"{name} of {owner}", value, 0)
        names = {id(param): name for name, param in module.named_parameters()}
        for param in params:
            self._tensors[id(param)] = (names[id(param)], param)

    def _find(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._tensors.setdefault(id(value), (name, value))
        elif _state_setter(value) is not None:
            self._generators[id(value)] = value
        elif self._is_new_container(value) and depth < _MOST_DEPTH:
            self._containers[id(value)] = value
            for item in value.values() if isinstance(value, dict) else value:
                self._find(name, item, depth + 1)

    def _is_new_container(self, value: Any) -> bool:
        is_known = id(value) in self._containers or len(self._containers) == _MOST_CONTAINERS
        return type(value) in _CONTAINERS and not is_known

    def note(self) -> NotedState:
        """What it is now, so that it can be so again."""
        generators = [*self._generators.values(), random]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            generators.append(numpy.random)
        return NotedState(
            [attributes.copy() for _, attributes in self._owners],
            [(container, container.copy()) for container in self._containers.values()],
            [(name, tensor, _version(tensor)) for name, tensor in self._tensors.values()],
            [_state_setter(generator) for generator in generators],
            [attributes for _, attributes in self._owners],
        )


class NotedState:
    """The state when it was noted."""

    def __init__(
        self,
        attributes: list[dict[str, Any]],
        containers: list[tuple[Any, Any]],
        tensors: list[tuple[str, torch.Tensor, int]],
        generators: list[Callable[[], None] | None],
        owners: list[dict[str, Any]],
    ):
        """``attributes``: copies of ``owners``. ``containers``: each with a copy. ``tensors``: their names and
        versions. ``generators``: calls that set their states.
        """
        self._attributes = attributes
        self._containers = containers
        self._tensors = tensors
        self._generators = generators
        self._owners = owners

    def changed_tensors(self) -> list[str]:
        """The names of those that were changed in place since, which cannot be undone."""
        return [name for name, tensor, version in self._tensors if _version(tensor) != version]

    def restore(self) -> None:
        """Attributes, containers and generators are what they were."""
        for owner, noted in zip(self._owners, self._attributes, strict=True):
            for name in _changed_names(owner, noted):
                if name in noted:
                    owner[name] = noted[name]
                else:
                    del owner[name]
        for container, noted in self._containers:
            if not _same_items(container, noted):
                container.clear()
                container.extend(noted) if hasattr(container, "extend") else container.update(noted)
        for restore in self._generators:
            if restore is not None:
                restore()


def _changed_names(owner: dict[str, Any], noted: dict[str, Any]) -> list[str]:
    missing = object()
    names = {**owner, **noted}
    changed = [name for name in names if owner.get(name, missing) is not noted.get(name, missing)]
    return [name for name in changed if name not in _NOT_THE_USERS]


def _same_items(one: Any, other: Any) -> bool:
    def items(container: Any) -> Iterator[Any]:
        pairs = container.items() if isinstance(container, dict) else ((item,) for item in container)
        return itertools.chain.from_iterable(pairs)

    return len(one) == len(other) and all(a is b for a, b in zip(items(one), items(other), strict=True))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _state_setter(generator: Any) -> Callable[[], None] | None:
    """A call that gives a generator of random numbers its present state again; None for what is none."""
    numpy = sys.modules.get("numpy")
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return lambda: _set_state(generator, state)
    if generator is random or isinstance(generator, random.Random):
        numbers = generator.getstate()
        return lambda: generator.setstate(numbers)
    if numpy is None:
        return None
    if generator is numpy.random or isinstance(generator, numpy.random.RandomState):
        noted = generator.get_state(legacy=False)
        return lambda: generator.set_state(noted)
    if isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator
        position = bits.state
        return lambda: setattr(bits, "state", position)
    return None

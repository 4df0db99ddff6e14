"""State of a module that a forward may change beside parameters and buffers: attributes, random number generators.

Attributes are values assigned to a module, and the items of its lists, dicts, sets and deques. Tensors among them are
compared by version. Other objects are not inspected. PyTorch's own modules (``torch.nn``) change no attribute in a
forward.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from patrickstar.module.attributes import CONTAINERS, NOT_THE_USERS, held_values
from patrickstar.module.chunked_parameter import ChunkedParameter, ChunkedView


class ModuleState:
    """Attributes and generators of ``module`` and its submodules, and ``params``, which PyTorch keeps."""

    def __init__(self, module: nn.Module, params: Iterable[nn.Parameter]):
        self._owners = [child.__dict__ for child in module.modules() if not _is_pytorchs(child)]
        self._containers: list[Any] = []
        self._tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self._generators: dict[int, Any] = {}
        for held in held_values(module):
            if isinstance(held.value, (ChunkedParameter, ChunkedView)):
                continue  # ForwardWrites records their changes
            if isinstance(held.value, torch.Tensor):
                self._tensors.setdefault(id(held.value), (held.name, held.value))
            elif type(held.value) in CONTAINERS:
                self._containers.append(held.value)
            elif _state_setter(held.value) is not None:
                self._generators[id(held.value)] = held.value
        names = {id(param): name for name, param in module.named_parameters()}
        for param in params:
            self._tensors[id(param)] = (names[id(param)], param)

    def note(self) -> NotedState:
        """A snapshot that :meth:`NotedState.restore` restores."""
        generators = [*self._generators.values(), random]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            generators.append(numpy.random)
        return NotedState(
            [attributes.copy() for attributes in self._owners],
            [(container, container.copy()) for container in self._containers],
            [(name, tensor, _version(tensor)) for name, tensor in self._tensors.values()],
            [_state_setter(generator) for generator in generators],
            self._owners,
        )


class NotedState:
    """A snapshot of a module's state."""

    def __init__(
        self,
        attributes: list[dict[str, Any]],
        containers: list[tuple[Any, Any]],
        tensors: list[tuple[str, torch.Tensor, int]],
        generators: list[Callable[[], None] | None],
        owners: list[dict[str, Any]],
    ):
        """``attributes``: copies of ``owners``. ``containers``: each with a copy. ``tensors``: names and versions.
        ``generators``: functions that restore their states.
        """
        self._attributes = attributes
        self._containers = containers
        self._tensors = tensors
        self._generators = generators
        self._owners = owners

    def changed_tensors(self) -> list[str]:
        """Names of tensors that were changed in place since, which cannot be undone."""
        return [name for name, tensor, version in self._tensors if _version(tensor) != version]

    def restore(self) -> None:
        """Restores attributes, containers and generators."""
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


def _is_pytorchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and "forward" not in vars(module)


def _changed_names(owner: dict[str, Any], noted: dict[str, Any]) -> list[str]:
    missing = object()
    names = {**owner, **noted}
    changed = [name for name in names if owner.get(name, missing) is not noted.get(name, missing)]
    return [name for name in changed if name not in NOT_THE_USERS]


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
    """A function that restores a random number generator's present state; None if ``generator`` is none."""
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

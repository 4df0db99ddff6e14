"""Attributes of modules that are not parameters, buffers or submodules, and the items of plain containers in them.
Other objects are not searched.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
"""Containers that are searched, and copied by ``copy()``; tuples are searched too."""
NOT_THE_USERS = (frozenset(nn.Module().__dict__) - {"training"}) | {"_compiled_call_impl"}
"""Attributes that belong to PyTorch."""
_MOST_CONTAINERS = 4096
_MOST_DEPTH = 3


@dataclasses.dataclass(frozen=True, slots=True)
class HeldValue:
    """A value held by a module."""

    value: Any
    attribute: str
    """The attribute that holds the value, directly or in a container."""
    owner: nn.Module
    name: str
    """The qualified attribute name, for messages."""


def held_values(module: nn.Module) -> Iterator[HeldValue]:
    """Values that ``module`` and its submodules hold, containers included; each container once."""
    seen: set[int] = set()
    for owner_name, owner in module.named_modules():
        for attribute, value in owner.__dict__.items():
            if attribute not in NOT_THE_USERS:
                name = f"{owner_name}.{attribute}" if owner_name else attribute
                for item in _walk(value, seen, 0):
                    yield HeldValue(item, attribute, owner, name)


def _walk(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if type(value) not in (*CONTAINERS, tuple):
        yield value
        return
    if id(value) in seen or len(seen) == _MOST_CONTAINERS or depth == _MOST_DEPTH:
        return
    seen.add(id(value))
    yield value
    for item in value.values() if isinstance(value, dict) else value:
        yield from _walk(item, seen, depth + 1)

"""Attributes of modules beside parameters, buffers and other modules, and the items of plain containers among these.
Other objects are not looked into.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
"""Types whose items are looked at, and that are copied by ``copy()``; tuples are looked at as well."""
NOT_THE_USERS = (frozenset(nn.Module().__dict__) - {"training"}) | {"_compiled_call_impl"}
"""Attributes that are PyTorch's."""
_MOST_CONTAINERS = 4096
_MOST_DEPTH = 3


@dataclasses.dataclass(frozen=True, slots=True)
class HeldValue:
    """A value that a module holds."""

    value: Any
    attribute: str
    """The attribute that it is, or lies in."""
    owner: nn.Module
    """The module."""
    name: str
    """The attribute's name, for messages."""


def held_values(module: nn.Module) -> Iterator[HeldValue]:
    """Values that ``module`` and the modules inside it hold, containers among them; each container once."""
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

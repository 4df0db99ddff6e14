"""Replaces the class of objects that other code makes, without replacing the class's name there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replacing(base: type, choose: Callable[[type], type]) -> Iterator[None]:
    """Context in which a call of ``base``, or of a subclass, returns an object of ``choose(<that class>)``."""
    # Calling a class returns the object of its `__new__`, initialised by that object's own class. Replacing names such
    # as `transformers.Trainer` would miss earlier imports.
    before = base.__dict__.get("__new__", _plain_new)
    base.__new__ = lambda cls, *_, **__: object.__new__(choose(cls))  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        base.__new__ = before  # not deleted: a class whose `__new__` was deleted accepts no arguments


def as_it_is(base: type) -> contextlib.AbstractContextManager[None]:
    """Context in which ``base`` is not replaced."""
    return replacing(base, lambda cls: cls)


@staticmethod
def _plain_new(cls: type, *_: Any, **__: Any) -> Any:
    return object.__new__(cls)

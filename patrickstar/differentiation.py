"""Custom functions of autograd without a second derivative: :func:`differentiable_once` decorates their backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_Backward = Callable[..., Any]


def differentiable_once(subject: str, remedy: str) -> Callable[[_Backward], _Backward]:
    """PyTorch's ``once_differentiable``, which raises RuntimeError for ``create_graph=True``.

    PyTorch's alone leaves terms out, without an error, where the incoming gradient depends on nothing.

    Args:
        subject: of the error, in the plural.
        remedy: the last part of the error.
    """

    def checked(backward: _Backward) -> _Backward:
        once = once_differentiable(backward)

        @functools.wraps(backward)
        def wrapper(ctx: Any, *grads: Any) -> Any:
            if torch.compiler.is_compiling():
                return once(ctx, *grads)
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"backward is called with create_graph=True, but {subject} have no second derivative; {remedy}"
                )
            return backward(ctx, *grads)

        return wrapper

    return checked

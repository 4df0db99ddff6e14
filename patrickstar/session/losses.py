"""Checks of the loss that a backward begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from patrickstar import _C

_BEFORE_FORWARD = (
    "backward before forward: call loss = model(inputs) first (not under torch.no_grad()), then model.backward(loss); "
    "where the loss comes of parts of the model alone, call them in model.run_forward(lambda: ...)"
)


def check_loss(loss: Any, has_forward: bool) -> None:
    """Checks the argument of ``backward``. ``has_forward``: a forward came before, or runs within the backward.

    Raises:
        ValueError: no tensor of one element.
        StateError: no graph to run backward through.
    """
    if not isinstance(loss, torch.Tensor):
        raise ValueError(
            f"backward got a {type(loss).__name__}; give the loss tensor (for a Hugging Face model: output.loss)"
        )
    if loss.numel() != 1:
        raise ValueError(f"the loss has shape {tuple(loss.shape)}; reduce it to one number, for example loss.mean()")
    if not has_forward:
        raise _C.StateError(_BEFORE_FORWARD)
    if not loss.requires_grad:
        raise _C.StateError(
            "the loss does not require grad: it was computed without the model, under torch.no_grad(), or all "
            "parameters are frozen"
        )


def has_forwards_in_backward(loss: Any, has_param: Callable[[nn.Parameter], bool]) -> bool:
    """True if hooks of the loss will call the model within its backward.

    A contrastive loss over cached representations (GradCache; CachedMultipleNegativesRanking in sentence-transformers)
    calls the model without gradients. A hook on the loss then runs forward and backward of one mini-batch after
    another. The engine sees the backward first, with forwards in it as in a recomputation. Such a loss depends on no
    parameter of the model and has a hook on a leaf.
    """
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return False
    leaves = list(_leaves(loss))
    return any(leaf._backward_hooks for leaf in leaves) and not any(map(has_param, leaves))


def no_gradients_came() -> _C.StateError:
    """The error for hooks that gave no parameter a gradient."""
    return _C.StateError(f"the loss gave no parameter a gradient; {_BEFORE_FORWARD}")


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors whose gradients autograd accumulates."""
    if loss.grad_fn is None:
        yield loss
        return
    seen, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)

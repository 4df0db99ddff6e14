"""The attention mask of a context-parallel call.

A Hugging Face model lets transformers make a mask and passes it to the attention of each layer. In a context-parallel
call the mask is a :class:`SharedMask`: it has a shape and no memory, tells which keys a query sees (:class:`Reach`),
and carries the call. Attention thus finds the call in an argument that no layer can leave out, also when a checkpointed
layer is recomputed in backward.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from patrickstar.sequence.memoryless import ASKED_FREELY

Sees = Callable[..., torch.Tensor]
"""transformers' description of a mask: takes broadcastable indices of sequences, heads, queries and keys; returns True
where the query sees the key.
"""

_NEAR = 16
_FAR = tuple(2**power for power in range(4, 22))
"""Distances that are tried beside near ones, in case a window was not declared."""
_STILL_A_MASK = {
    torch.Tensor.detach, torch.Tensor.to, torch.Tensor.contiguous, torch.Tensor.__getitem__,
    torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__,
}  # fmt: skip
"""Functions of models and checkpoints that leave the mask unchanged. Slicing would cut a cache's keys, and there is no
cache.
"""


@dataclasses.dataclass(frozen=True)
class Reach:
    """The keys that a query sees, as a range of distances."""

    back: int | None
    """Tokens before the query; None: all."""
    forward: int | None
    """Tokens after it; None: all."""

    @property
    def is_causal(self) -> bool:
        """True if no query sees a later key."""
        return self.forward == 0

    @property
    def window(self) -> tuple[int, int]:
        """The argument of :func:`patrickstar.sequence.attention`."""
        return (-1 if self.back is None else self.back, -1 if self.forward is None else self.forward)


def reach_of(sees: Sees, window: int | None) -> Reach | None:
    """The reach of a transformers mask, found by trial; None if distances alone do not describe the mask.

    Args:
        sees: the mask, without padding and documents.
        window: the window's length given to transformers, if any.
    """
    length = 2 * (window or 0) + _NEAR
    try:
        middle = _row(sees, length // 2, torch.arange(length, device="cpu"))
        seen = middle.nonzero().flatten().tolist()
        if not seen:
            return None
        back, forward = length // 2 - seen[0], seen[-1] - length // 2
        found = Reach(
            None if seen[0] == 0 else back,
            None if seen[-1] == length - 1 else forward,
        )
        far = max(_FAR)
        rows = [(query, torch.arange(length, device="cpu")) for query in (0, 1, length // 2, length - 1)]
        rows += [(far, far - torch.tensor(_FAR, device="cpu")), (0, torch.tensor(_FAR, device="cpu"))]
        agrees = all(torch.equal(_row(sees, query, keys), _reaches(found, query, keys)) for query, keys in rows)
    except (IndexError, RuntimeError):  # the mask looks up token data
        return None
    return found if agrees else None


def _row(sees: Sees, query: int, keys: torch.Tensor) -> torch.Tensor:
    first = torch.zeros((1, 1), dtype=torch.long, device="cpu")
    return sees(first, first, torch.tensor([[query]], device="cpu"), keys[None]).expand(1, len(keys))[0].bool()


def _reaches(reach: Reach, query: int, keys: torch.Tensor) -> torch.Tensor:
    seen = torch.ones_like(keys, dtype=torch.bool)
    if reach.back is not None:
        seen &= query - keys <= reach.back
    if reach.forward is not None:
        seen &= keys - query <= reach.forward
    return seen


class SharedMask(torch.Tensor):
    """A mask without memory; see the module's docstring.

    Args:
        call: the context-parallel call.
        reach: which keys a query sees; None if unknown.
        shape: [batch, 1, queries, keys].
        device: device of the model's tensors.
    """

    call: Any
    reach: Reach | None

    @staticmethod
    def __new__(cls, call: Any, reach: Reach | None, shape: Sequence[int], device: torch.device | str) -> SharedMask:  # noqa: D102
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.call, mask.reach = call, reach
        return mask

    def __init__(self, *_: Any):
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers for shape and similar metadata.

        Raises:
            ValueError: a function computes with the mask.
        """
        if func in ASKED_FREELY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _STILL_A_MASK and isinstance(args[0], SharedMask):
            return args[0]
        raise ValueError(
            f"{_asking_module()} computes with its attention mask ({getattr(func, '__name__', func)}), so that which "
            "keys a query sees is not known where ranks share a sequence; leave sequence_parallel out"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the mask itself if autograd detaches it.

        Raises:
            NotImplementedError: for any other function; none reaches it.
        """
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a mask that has no memory")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SharedMask(shape={tuple(self.shape)}, {self.reach})"


def _asking_module() -> str:
    """Class name of the innermost module that is being called."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return "the model"

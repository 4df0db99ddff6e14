"""Sequence parallelism in a plan: a rank's tokens, and the cost of attention over all tokens.

A Hugging Face model is called with one rank's tokens, as by an engine
(:class:`patrickstar.sequence.hugging_face.ShardedModel`), with :func:`planned_attention` as its attention. That
function computes nothing. It allocates the memory of patrickstar/sequence/ring.py and ulysses.py, and charges the
seconds of :func:`patrickstar.sequence.choice.choose_mode`. With tensor parallelism it covers a rank's heads and samples
(patrickstar/parallel/sharded_sequences.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from patrickstar.sequence.choice import Choice, Links, choose_mode
from patrickstar.sequence.division import Division
from patrickstar.sequence.hugging_face import attended, check_model
from patrickstar.sequence.layout import Mode
from patrickstar.sequence.sharded_attention import check_layer
from patrickstar.sequence.shared_mask import Reach, SharedMask
from patrickstar.sequence.ulysses import key_heads, query_heads

_ATTENTION = "patrickstar_plan"  # its name in transformers' attention registry


class CannotDivideError(ValueError):
    """The model's sequences cannot be sharded; the message names the model."""


class PlannedDivision:
    """Sequence parallelism of one model.

    Args:
        model: may be tensor-parallel.
        batch: sequences of a rank.
        length: tokens per sequence.
        size: ranks that share each sequence.
        links: speed of attention and of communication.
        head_ranks: ranks that divide the heads of each layer.

    Raises:
        CannotDivideError: the model's sequences cannot be sharded.
    """

    def __init__(self, model: nn.Module, batch: int, length: int, size: int, links: Links, head_ranks: int = 1):
        try:
            check_model(model)
        except ValueError as error:
            raise CannotDivideError(str(error)) from error
        _register()
        model.set_attn_implementation(_ATTENTION)
        work = attended(model, batch, length)
        work = dataclasses.replace(work, heads=work.heads // head_ranks, key_heads=max(work.key_heads // head_ranks, 1))
        self.size = size
        self.choice: Choice = choose_mode(work, size, links)
        """The chosen attention algorithm and the reason."""
        self.local_length = Division(0, size, self.choice.mode, length).local_length
        """Tokens of each sequence on a rank."""
        whole = 4.0 * work.batch * work.heads * work.length**2 * work.head_dim / size
        self.flops = (whole, 2.5 * whole)
        """FLOPs of one layer on one rank, forward and backward, without regard to masks."""
        self.charge: Callable[[float, float], None] = _nowhere
        """Takes the seconds and FLOPs of one layer's forward or backward."""

    def trace(self, costs: Any) -> None:
        """Begins a traced step; attention is charged to ``costs``."""
        self.charge = costs.charge

    def inputs(self, batch: int, model: nn.Module) -> dict[str, Any]:
        """Returns one rank's arguments of the model's forward, on the meta device."""
        tokens = torch.empty(batch, self.local_length, dtype=torch.long, device="meta")
        found = {"input_ids": tokens, "labels": tokens, "position_ids": tokens}
        if getattr(model, "loss_type", None) in ("ForCausalLM", None):
            found["shift_labels"] = tokens
        # transformers passes a four-dimensional mask through. Inputs count as memory, so it has one element.
        found["attention_mask"] = SharedMask(self, Reach(None, None), (1, 1, 1, 1), "meta")
        return found


def planned_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Implements transformers' interface: [batch, heads, tokens, head_dim] in, [batch, tokens, heads, head_dim] out.

    Raises:
        CannotDivideError: the layer needs another kind of scores.
    """
    try:
        check_layer(type(module).__name__, query, key, kwargs)
    except ValueError as error:
        raise CannotDivideError(str(error)) from error
    out = _PlannedAttention.apply(query, key, value, kwargs.get("s_aux"), mask.call)
    return out.transpose(1, 2).contiguous(), None


class _PlannedAttention(torch.autograd.Function):
    """Allocates the real attention's memory: tensors saved for backward, and temporary ones."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        division: PlannedDivision,
    ) -> torch.Tensor:
        ctx.division, ctx.sinks = division, sinks
        saved = [query, key, value]
        if division.choice.mode is Mode.ULYSSES:
            saved = _by_heads(saved, division.size)
            beside: list[torch.Tensor] = []
        else:
            # Present and arriving keys and values, the running sum, and a block's output.
            beside = [torch.empty_like(part) for part in (key, value, key, value)]
            beside += [_wide(query), torch.empty_like(query)]
        out = _token_major(saved[0])
        log_sums = saved[0].new_empty(saved[0].shape[:-1], dtype=torch.float32)
        del beside
        ctx.save_for_backward(*saved, out, log_sums)
        ctx.local = [part.shape for part in (query, key, value)]
        division.charge(division.choice.forward.seconds, division.flops[0])
        return out if out.shape == query.shape else _token_major(query)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        query, key, value, *_ = ctx.saved_tensors
        division = ctx.division
        if division.choice.mode is Mode.ULYSSES:
            beside = [torch.empty_like(part) for part in (query, query, key, value)]
        else:
            # Besides arriving keys and values: sums of this block, departing and arriving ones.
            beside = [torch.empty_like(part) for part in (key, value, key, value)]
            beside += [_wide(part) for part in (key, value) * 3]
            beside += [_wide(query), torch.empty_like(query)]
        grads = [_token_major(grad.new_empty(shape)) for shape in ctx.local]
        del beside
        division.charge(division.choice.backward.seconds, division.flops[1])
        return (*grads, None if ctx.sinks is None else torch.empty_like(ctx.sinks), None)


def _by_heads(parts: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """All tokens of a rank's heads."""
    query, key, _ = parts
    num_keys = len(key_heads(query_heads(query.shape[1], size), query.shape[1] // key.shape[1])[0])
    counts = (query.shape[1] // size, num_keys, num_keys)
    return [
        part.new_empty((part.shape[0], count, part.shape[2] * size, part.shape[3]))
        for part, count in zip(parts, counts, strict=True)
    ]


def _token_major(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _wide(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, dtype=torch.float32)


def _nowhere(seconds: float, flops: float) -> None:
    """Used outside of a trace."""


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    AttentionInterface.register(_ATTENTION, planned_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, sdpa_mask)

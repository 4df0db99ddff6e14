"""Token scores, from which TRL's trainers compute losses and metrics.

TRL (``add_fused_lm_head``) gives a model a forward that returns no logits. It returns the log-probability of each next
token, and other values per token for metrics, each [batch, tokens]. These take a few bytes per token, so every rank can
all-gather those of all tokens. A trainer then computes what it computes on one GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.sequence.division import Division, LikeWholeTokens
from patrickstar.sequence.group import HybridGroup, SequenceGroup

_LOG_PROBS, _MASK = "log_probs", "label_mask"
_FIELDS = (_LOG_PROBS, "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", _MASK)
"""Fields of TRL's ``FusedCausalLMOutput``, all of one shape."""


def has_scores(output: Any) -> bool:
    """True if the model returned token scores."""
    return all(getattr(output, name, None) is not None for name in (_LOG_PROBS, _MASK))


def gather_scores(output: Any, group: SequenceGroup | HybridGroup, division: Division, num_scored: int) -> None:
    """All-gathers token scores, in one exchange, and replaces this rank's by them.

    Args:
        output: an output for which :func:`has_scores` is true.
        group: the ranks that share the sequences.
        division: the sharding of the sequences.
        num_scored: tokens of each sequence, from the first, whose scores an unsharded call returns.
    """
    names = [name for name in _FIELDS if getattr(output, name, None) is not None]
    mine = [getattr(output, name) for name in names]
    dtype = torch.promote_types(output.log_probs.dtype, torch.float32)
    stacked = torch.stack([scores.to(dtype) for scores in mine])
    whole = LikeWholeTokens.apply(stacked, group, division, -1)[..., :num_scored]
    for name, before, scores in zip(names, mine, whole.unbind(), strict=True):
        setattr(output, name, scores.to(before.dtype))

"""Scores of tokens, which TRL's trainers make their losses and metrics of.

TRL (``add_fused_lm_head``) gives a model a forward that returns no logits: the log-probability of each next token, and
what else of each token its metrics need, [batch, tokens]. A few bytes for each token, so every rank can have those of
all tokens, and what a trainer computes of them is what it computes on one GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.sequence.division import Division, LikeWholeTokens
from patrickstar.sequence.group import HybridGroup, SequenceGroup

_LOG_PROBS, _MASK = "log_probs", "label_mask"
_FIELDS = (_LOG_PROBS, "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", _MASK)
"""Of TRL's ``FusedCausalLMOutput``, all of one shape."""


def has_scores(output: Any) -> bool:
    """Whether a model returned scores of tokens."""
    return all(getattr(output, name, None) is not None for name in (_LOG_PROBS, _MASK))


def gather_scores(output: Any, group: SequenceGroup | HybridGroup, division: Division, num_scored: int) -> None:
    """Puts the scores of all ranks' tokens in place of this rank's, in one exchange.

    Args:
        output: for which :func:`has_scores` holds.
        group: ranks that share the sequences.
        division: of the sequences among them.
        num_scored: tokens of each sequence, from its first, whose scores are returned without a division.
    """
    names = [name for name in _FIELDS if getattr(output, name, None) is not None]
    mine = [getattr(output, name) for name in names]
    dtype = torch.promote_types(output.log_probs.dtype, torch.float32)
    stacked = torch.stack([scores.to(dtype) for scores in mine])
    whole = LikeWholeTokens.apply(stacked, group, division, -1)[..., :num_scored]
    for name, before, scores in zip(names, mine, whole.unbind(), strict=True):
        setattr(output, name, scores.to(before.dtype))

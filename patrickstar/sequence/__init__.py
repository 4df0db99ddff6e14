"""Context parallelism: attention over a sequence that is sharded over ranks, so that no device holds all of it.

    from patrickstar.sequence import attention
    out = attention(q, k, v, group, mode="zigzag", causal=True)

Each rank passes the queries, keys and values of its own tokens, and gets the outputs of its own tokens. Modes:

* ``rsa``: ring self-attention as published (Li et al., *Sequence Parallelism: Long Sequence Training from System
  Perspective*, arXiv 2105.13120). Keys go round the ring, whole rows of scores are kept, then values go round.
* ``ring``: blockwise attention whose outputs are merged by their log-sum-exp (Liu et al., *Ring Attention with
  Blockwise Transformers*, arXiv 2310.01889).
* ``zigzag``: ``ring`` in which each rank has an early and a late slice, so that causal attention is balanced.
* ``ulysses``: all-to-all; each rank gets some heads of the whole sequence (Jacobs et al., *DeepSpeed Ulysses*, arXiv
  2309.14509).
* ``hybrid``: Ulysses within groups of ranks and rings across them (Fang and Zhao, *USP*, arXiv 2405.07719).

:func:`linear_cross_entropy` is a loss for long sequences whose logits would not fit. :func:`in_tiles` computes
token-wise functions some tokens at a time.
"""

from patrickstar.sequence.attention import attention
from patrickstar.sequence.group import HybridGroup, SequenceGroup
from patrickstar.sequence.layout import Mode, positions_of_rank
from patrickstar.sequence.losses import linear_cross_entropy
from patrickstar.sequence.masking import Padding
from patrickstar.sequence.tiling import in_tiles

__all__ = [
    "HybridGroup",
    "Mode",
    "Padding",
    "SequenceGroup",
    "attention",
    "in_tiles",
    "linear_cross_entropy",
    "positions_of_rank",
]

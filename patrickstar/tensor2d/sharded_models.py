"""Hugging Face models under one-dimensional tensor parallelism with sequence parallelism.

    parallelize_1d(model, line)                               # on all ranks, with the same whole values
    loss = model(tokens, labels=tokens).loss                  # of whole sequences; each rank takes its tokens

The plans are those of :mod:`patrickstar.tensor2d.plans`; only the pairs of layers differ
(:mod:`patrickstar.tensor2d.one_dimension`).
"""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.tensor2d.attention import Heads
from patrickstar.tensor2d.hugging_face import SHARDED
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.losses import whole_logits
from patrickstar.tensor2d.one_dimension import ColumnLinear1D, LMHead1D, RowLinear1D, tall_group, wide_group
from patrickstar.tensor2d.plans import replace_loss, replace_modules
from patrickstar.tensor2d.sharded_tokens import ShardedTokens, causal_mask, padding_mask
from patrickstar.tensor2d.styles import Pairs


class Head(LMHead1D):
    """Returns this rank's logits [b, s, v/p] with autograd on. With autograd off, as in ``generate``, logits have the
    whole vocabulary: [b, s, vocabulary].
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # noqa: D102
        logits = super().forward(hidden)
        if torch.is_grad_enabled():
            return logits
        return whole_logits(logits, self.vocabulary, wide_group(self.group.along_rows))


ONE_DIMENSION = Pairs(ColumnLinear1D, RowLinear1D, Head, "rows")


def parallelize_1d(model: Any, line: Line) -> None:
    """Shards the parameters of ``model`` over ``line``, module by module, in place.

    Afterwards call the model on each rank with tokens and labels of whole sequences, [b, s]. It returns the loss of the
    whole batch and logits of all tokens: [b, s, v/p] with autograd on, the whole vocabulary with autograd off. In
    training ranks must divide s.

    Args:
        model: a Hugging Face causal or masked language model, with the same whole values on all ranks or on the meta
            device.
        line: the ranks.

    Raises:
        ValueError: there is no 1D plan for the model, or a size is not divisible. The model may then be partly sharded.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in SHARDED:
        raise ValueError(
            f"{type(model).__name__} (model type {kind!r}) has no plan in one dimension; there are plans for "
            f"{', '.join(sorted(SHARDED))}: take a mesh of rows and columns, or write the model with one_dimension's "
            "layers"
        )
    heads = replace_modules(model, tall_group(line), SHARDED[kind], ONE_DIMENSION)
    sees_all = any(isinstance(module, Heads) and not module.is_causal for module in model.modules())
    ShardedTokens(line, padding_mask if sees_all else causal_mask).attach(model)
    if heads:  # after the hooks that shard tokens: labels and logits are those of the given tokens
        replace_loss(model, heads[0].vocabulary, wide_group(line))

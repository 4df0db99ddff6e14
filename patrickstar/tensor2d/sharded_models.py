"""Models of Hugging Face in one dimension: pairs of layers divided over ranks, with sequences sharded between them.

    parallelize_1d(model, line)                               # all ranks call it, with the same whole values
    loss = model(tokens, labels=tokens).loss                  # of whole sequences, of which each rank takes its tokens

The plans are those of :mod:`patrickstar.tensor2d.plans`; what differs is what pairs are made of
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
    """Gives this rank's logits [b, s, v/p] where autograd is on, and without autograd, as in ``generate``, those of the
    whole vocabulary [b, s, vocabulary].
    """

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # noqa: D102
        logits = super().forward(hidden)
        if torch.is_grad_enabled():
            return logits
        return whole_logits(logits, self.vocabulary, wide_group(self.group.along_rows))


ONE_DIMENSION = Pairs(ColumnLinear1D, RowLinear1D, Head, "rows")


def parallelize_1d(model: Any, line: Line) -> None:
    """Divides the parameters of ``model`` over ``line``, module by module, in place.

    The model is then called on each rank with the tokens and labels of whole sequences, [b, s], and gives logits of all
    tokens, [b, s, v/p] where autograd is on and of the whole vocabulary where it is off, and the loss of the whole
    batch. Ranks divide s in training.

    Args:
        model: a causal or masked language model of Hugging Face, with the same whole values on all ranks or on the
            meta device.
        line: the ranks.

    Raises:
        ValueError: there is no such plan for the model, or a size cannot be divided. The model may be divided in part
            then.
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
    if heads:  # behind what divides tokens: labels and logits are those of the tokens that were given
        replace_loss(model, heads[0].vocabulary, wide_group(line))

"""Hugging Face models under one-dimensional tensor parallelism with sequence parallelism.

    parallelize_1d(model, line)                               # on all ranks, with the same whole values
    loss = model(tokens, labels=tokens).loss                  # of whole sequences; each rank takes its tokens

Modules are those of :mod:`patrickstar.tensor2d.structure`; only the pairs of layers differ from two dimensions
(:mod:`patrickstar.tensor2d.one_dimension`).
"""

from __future__ import annotations

from typing import Any

import torch

from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.losses import whole_logits
from patrickstar.tensor2d.model_losses import replace_loss
from patrickstar.tensor2d.one_dimension import ColumnLinear1D, LMHead1D, RowLinear1D, tall_group, wide_group
from patrickstar.tensor2d.plans import shard_by_structure
from patrickstar.tensor2d.sharded_tokens import ShardedTokens
from patrickstar.tensor2d.structure import Structure, find_structure, refused
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
    whole batch and logits of all tokens: [b, s, v/p] with autograd on, the whole vocabulary with autograd off. A
    classifier's scores are whole. In training ranks must divide s.

    Args:
        model: of Hugging Face, with the same whole values on all ranks or on the meta device.
        line: the ranks.

    Raises:
        ValueError: a module, which is named, has no form in one dimension, or a size is not divisible. The model may
            then be partly sharded.
    """
    structure = find_1d_structure(model)
    heads = shard_by_structure(model, tall_group(line), structure, ONE_DIMENSION)
    ShardedTokens(line).attach(model, structure)
    if heads:
        replace_loss(model, heads[0].vocabulary, wide_group(line))


def has_1d_form(model: Any) -> bool:
    """True if :func:`find_1d_structure` finds one."""
    try:
        find_1d_structure(model)
    except ValueError:
        return False
    return True


def find_1d_structure(model: Any) -> Structure:
    """:func:`find_structure`, for one dimension.

    Raises:
        ValueError: a module has no form in one dimension.
    """
    structure = find_structure(model)
    prefix = f"{model.base_model_prefix}."
    others = [name for name in structure.linears if structure.head is None or name.startswith(prefix)]
    if others:
        raise refused(
            model,
            f"{others[0]} is outside of the layers and may take single tokens, of which in one dimension each rank has "
            "others",
            'set tensor_parallel.mode to "2d"',
        )
    return structure

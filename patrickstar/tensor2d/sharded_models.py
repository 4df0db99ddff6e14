"""Models of Hugging Face in one dimension: pairs of layers divided over ranks, with sequences sharded between them.

    parallelize_1d(model, line)                               # all ranks call it, with the same whole values
    loss = model(tokens, labels=tokens).loss                  # of whole sequences, of which each rank takes its tokens

The plans are those of :mod:`patrickstar.tensor2d.plans`; what differs is what pairs are made of
(:mod:`patrickstar.tensor2d.one_dimension`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from patrickstar.tensor2d.hugging_face import SHARDED
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.one_dimension import ColumnLinear1D, LMHead1D, RowLinear1D, tall_group, wide_group
from patrickstar.tensor2d.plans import plan_for, replace_loss, replace_modules
from patrickstar.tensor2d.styles import Pairs

ONE_DIMENSION = Pairs(ColumnLinear1D, RowLinear1D, LMHead1D, "rows")


def parallelize_1d(model: Any, line: Line) -> None:
    """Divides the parameters of ``model`` over ``line``, module by module, in place.

    The model is then called on each rank with the tokens and labels of whole sequences, [b, s], and gives logits of all
    tokens, [b, s, v/p], and the loss of the whole batch. Ranks divide s.

    Args:
        model: a causal language model of Hugging Face, with the same whole values on all ranks or on the meta device.
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
    heads = replace_modules(model, tall_group(line), plan_for(model), ONE_DIMENSION)
    if heads:
        replace_loss(model, heads[0].vocabulary, wide_group(line))
    shard = _Shard(line)
    model.register_forward_pre_hook(shard.take, with_kwargs=True)
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_pre_hook(shard.whole_positions, with_kwargs=True)


class _Shard:
    """Which tokens of sequences this rank has."""

    def __init__(self, line: Line):
        self._line = line
        self._whole: torch.Tensor | None = None

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Gives the model the rank's tokens of ``input_ids`` [b, s], and their positions."""
        if len(args) > 1 or kwargs.get("position_ids") is not None or kwargs.get("attention_mask") is not None:
            raise ValueError(
                f"{type(module).__name__} is divided in one dimension, where each rank takes its tokens of whole "
                "sequences; call it with input_ids and labels alone"
            )
        tokens = args[0] if args else kwargs["input_ids"]
        size, length = self._line.size, tokens.shape[1]
        if length % size:
            raise ValueError(
                f"sequences of {length} tokens cannot be divided among {size} ranks; give {-(-length // size) * size}"
            )
        self._whole = torch.arange(length, device=tokens.device)[None]
        mine = {"input_ids": tokens, "position_ids": self._whole}
        mine = {name: part.chunk(size, dim=1)[self._line.rank] for name, part in mine.items()}
        return (), {**kwargs, **mine, "use_cache": False}

    def whole_positions(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Rotary positions are those of whole sequences, since heads are divided where they are used."""
        return args[:1], {**kwargs, "position_ids": self._whole}

"""Tokens of a Hugging Face model in one dimension: each rank has some of them between pairs of linear layers.

The model is called with whole sequences [b, s], and its code makes masks and positions of them. A rank looks up its own
tokens; other tokens' rows are zeros. Before the first layer it cuts out its own, [b, s/p, h]. After the last one they
stand among zeros again, and the head cuts them out. A module that attends gets a stand-in of [b, s, h] without memory,
since its code takes shapes from its input. The first linear layers take the rank's tokens in its place.

With autograd off, sequences may have any length: each rank has as many tokens, and what comes after the last is cut off
whole sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.one_dimension import ColumnLinear1D, LMHead1D, RowLinear1D
from patrickstar.tensor2d.sharded_products import TOKENS
from patrickstar.tensor2d.structure import Structure
from patrickstar.tensor2d.sums import gathered

Given = tuple[tuple[Any, ...], dict[str, Any]]


class ShardedTokens:
    """Hooks that shard the tokens of each call over ``line``."""

    def __init__(self, line: Line):
        self._line = line
        self._length = 0
        self._kept: slice | torch.Tensor | None = None

    def attach(self, model: Any, structure: Structure) -> None:
        """Makes ``model``, whose modules are sharded, take whole sequences."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        table = model.get_submodule(structure.table)
        table.register_forward_pre_hook(self._own_indices)
        table.register_forward_hook(self._among_all)
        model.get_submodule(structure.layers[0]).register_forward_pre_hook(self._own_hidden, with_kwargs=True)
        model.get_submodule(structure.layers[-1]).register_forward_hook(self._among_all)
        for name in (*structure.scores, *([] if structure.head is None else [structure.head])):
            model.get_submodule(name).register_forward_pre_hook(self._own_hidden, with_kwargs=True)
        for attention in structure.attentions:
            model.get_submodule(attention.name).register_forward_pre_hook(self._stand_in, with_kwargs=True)
            for name in attention.pair.firsts:
                model.get_submodule(name).register_forward_pre_hook(_behind)
        for module in model.modules():
            if isinstance(module, RowLinear1D):
                module.register_forward_pre_hook(self._filled)
            elif isinstance(module, ColumnLinear1D):
                module.register_forward_hook(self._cut)
            elif isinstance(module, LMHead1D):
                module.register_forward_hook(self._cut_logits)
        for name in structure.scores:
            model.get_submodule(name).register_forward_hook(self._gathered)

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise ValueError(
                f"{type(module).__name__} is divided in one dimension, where ranks cut out their tokens of whole "
                "sequences; call it with input_ids or inputs_embeds"
            )
        size, self._length = self._line.size, tokens.shape[TOKENS]
        missing = -self._length % size
        if missing and torch.is_grad_enabled():
            raise ValueError(
                f"sequences of {self._length} tokens cannot be divided among {size} ranks; give "
                f"{self._length + missing}"
            )
        kept = kwargs.get("logits_to_keep")
        self._kept = kept if isinstance(kept, torch.Tensor) else slice(-kept, None) if kept else None
        return args, {**kwargs, "logits_to_keep": 0} if kept is not None else kwargs

    def _own_indices(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (self._own(args[0], 0), *args[1:])

    def _among_all(self, module: nn.Module, args: Any, output: Any) -> Any:
        """[b, s/p, h] -> [b, s, h], with zeros for other ranks' tokens."""
        if isinstance(output, tuple):
            return (self._among_all(module, args, output[0]), *output[1:])
        rows: torch.Tensor = output
        here, rank = rows.shape[TOKENS], self._line.rank
        filled = nn.functional.pad(rows, (0, 0, rank * here, (self._line.size - 1 - rank) * here))
        return filled[:, : self._whole_length(here)]

    def _own_hidden(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        return _with_hidden(args, kwargs, lambda hidden: self._own(hidden, 2))

    def _stand_in(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        def stand_in(shard: torch.Tensor) -> torch.Tensor:
            shape = shard.shape[0], self._whole_length(shard.shape[TOKENS]), shard.shape[-1]
            made = shard.new_full((), torch.nan).expand(shape)
            made.shard = shard  # type: ignore[attr-defined]
            return made

        return _with_hidden(args, kwargs, stand_in)

    def _filled(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        missing = -args[0].shape[TOKENS] % self._line.size
        return (nn.functional.pad(args[0], (0, 0, 0, missing)) if missing else args[0], *args[1:])

    def _cut(self, module: nn.Module, args: Any, whole: torch.Tensor) -> torch.Tensor:
        return whole[:, : self._whole_length(whole.shape[TOKENS] // self._line.size)]

    def _cut_logits(self, module: nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
        logits = self._cut(module, args, logits)
        return logits if self._kept is None else logits[:, self._kept]

    def _gathered(self, module: nn.Module, args: Any, scores: torch.Tensor) -> torch.Tensor:
        return self._cut(module, args, gathered(scores, self._line, TOKENS))

    def _own(self, whole: torch.Tensor, features: int) -> torch.Tensor:
        """This rank's tokens of a tensor with ``features`` / 2 dimensions after them; zeros after the last token."""
        missing = -whole.shape[TOKENS] % self._line.size
        whole = nn.functional.pad(whole, (0,) * features + (0, missing)) if missing else whole
        return whole.chunk(self._line.size, TOKENS)[self._line.rank]

    def _whole_length(self, here: int) -> int:
        """Tokens of whole sequences, of which a rank has ``here``: all of them, or those of a tile. A recomputation,
        with autograd, may be of another call than the last.
        """
        everyones = here * self._line.size
        is_last_call = not torch.is_grad_enabled() and 0 <= everyones - self._length < self._line.size
        return self._length if is_last_call else everyones


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> Given:
    """The arguments of a layer with another first one, which may be named."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _behind(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The rank's tokens behind a stand-in."""
    shard = getattr(args[0], "shard", None)
    if shard is None:
        raise ValueError(
            f"a {type(module).__name__} of attention takes something else than the input of attention, which has no "
            'form in one dimension; set tensor_parallel.mode to "2d"'
        )
    return (shard, *args[1:])

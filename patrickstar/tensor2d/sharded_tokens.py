"""Calls of a Hugging Face model under sequence parallelism: each rank has some tokens of whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from patrickstar.tensor2d.lines import Line

_WHOLE = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "logits_to_keep")

Mask = Callable[[torch.Tensor, int], torch.Tensor]
"""Maps the mask of real tokens [b, s'] and the number of padding tokens to the keys each token sees: [b, 1,
1 or s, s].
"""


class ShardedTokens:
    """Shards the tokens of each call of a language model over ``line``.

    Args:
        line: the ranks.
        mask: :func:`causal_mask` or :func:`padding_mask`.

    Masks and rotary positions stay those of whole sequences, since attention, where they are used, is sharded by heads.
    With autograd off, sequences may have any length: padding tokens come last, so no other token sees them, and logits
    are those of the given tokens.
    """

    def __init__(self, line: Line, mask: Mask):
        self._line = line
        self._mask = mask
        self._positions: torch.Tensor | None = None
        self._length = 0
        self._kept: int | torch.Tensor = 0

    def attach(self, model: nn.Module) -> None:
        """Makes ``model`` take whole sequences. Its cache is switched off: with each longer sequence a rank has other
        tokens, so ``generate`` recomputes all tokens for each new one.
        """
        model.register_forward_pre_hook(self.take, with_kwargs=True)
        model.register_forward_hook(self.cut)
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.register_forward_pre_hook(self.whole_positions, with_kwargs=True)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.use_cache = False  # type: ignore[union-attr]

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Replaces ``input_ids`` [b, s] by the rank's tokens and their positions, and an ``attention_mask`` [b, s] by
        the mask of all tokens [b, 1, s, s].

        Raises:
            ValueError: ranks do not divide s, or the call has other arguments.
        """
        given = {**kwargs, **({"input_ids": args[0]} if args else {})}
        tokens, mask, positions = (given.get(name) for name in _WHOLE[:3])
        odd = [name for name in ("inputs_embeds", "cache", "past_key_values") if given.get(name) is not None]
        if len(args) > 1 or tokens is None or odd or (mask is not None and mask.dim() != 2):
            raise ValueError(
                f"{type(module).__name__} is divided in one dimension, where each rank takes its tokens of whole "
                "sequences; call it with input_ids, labels, attention_mask [b, s] and position_ids by name, without a "
                "cache"
            )
        size, self._length, self._kept = self._line.size, tokens.shape[1], given.get("logits_to_keep") or 0
        missing = -self._length % size
        if missing and (torch.is_grad_enabled() or given.get("labels") is not None):
            raise ValueError(
                f"sequences of {self._length} tokens cannot be divided among {size} ranks; give "
                f"{self._length + missing}"
            )
        is_packed = positions is not None and bool(positions.diff().ne(1).any())
        if mask is None and is_packed:
            raise ValueError(
                f"{type(module).__name__} is divided in one dimension, where sequences that are packed into one cannot "
                "be told apart; leave position_ids out, or give an attention_mask"
            )
        if positions is None:
            positions = torch.arange(self._length, device=tokens.device)[None]
        self._positions = nn.functional.pad(positions, (0, missing))
        mine = {"input_ids": nn.functional.pad(tokens, (0, missing)), "position_ids": self._positions}
        if given.get("token_type_ids") is not None:
            mine["token_type_ids"] = nn.functional.pad(given["token_type_ids"], (0, missing))
        mine = {name: part.chunk(size, dim=1)[self._line.rank] for name, part in mine.items()}
        others = {name: value for name, value in given.items() if name not in _WHOLE}
        # eager attention makes masks from the tokens it gets; sdpa relies on is_causal
        makes_masks = _attention_of(module) == "eager"
        if missing or is_packed or makes_masks or (mask is not None and not mask.all()):
            others["attention_mask"] = self._mask(torch.ones_like(tokens) if mask is None else mask, missing)
        return (), {**others, **mine, "use_cache": False}

    def cut(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Cuts whole logits to those that the call requested."""
        if not torch.is_grad_enabled() and getattr(output, "logits", None) is not None:
            kept = slice(-self._kept, None) if isinstance(self._kept, int) else self._kept
            output.logits = output.logits[:, : self._length][:, kept]
        return output

    def whole_positions(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Passes the positions of all tokens of the call."""
        return args[:1], {**kwargs, "position_ids": self._positions}


def _attention_of(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def padding_mask(given: torch.Tensor, missing: int) -> torch.Tensor:
    """Each token sees all real tokens of ``given`` [b, s']: [b, 1, 1, s]."""
    return nn.functional.pad(given.bool(), (0, missing))[:, None, None]


def causal_mask(given: torch.Tensor, missing: int) -> torch.Tensor:
    """Each token sees the real tokens of ``given`` [b, s'] up to itself: [b, 1, s, s]."""
    seen = nn.functional.pad(given.bool(), (0, missing))
    length = seen.shape[1]
    return seen[:, None, None] & torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()

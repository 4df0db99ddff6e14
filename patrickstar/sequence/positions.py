"""Position ids of tokens in whole sequences, as a Hugging Face model numbers them.

A model numbers the tokens of a call. A call with a rank's tokens must therefore pass their numbers in the whole
sequence. :func:`find_positions` finds the model's numbering by trial: a call with these positions gives the same result
as a call without positions.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from patrickstar.sequence.sharded_attention import running_call

Call = Callable[[dict[str, Any]], torch.Tensor]
"""Calls a model with some arguments; returns its output per token, [batch, tokens, ...]."""

_ARGUMENT = "position_ids"
_CLOSE = 1e-5


class Numbering(enum.Enum):
    """How a model numbers the tokens of a sequence."""

    BY_PLACE = "from 0"
    AFTER_PADDING = "after the padding token's id, padding tokens aside"
    BY_MASK = "tokens that the attention mask has"


@dataclasses.dataclass(frozen=True)
class Positions:
    """The numbering of a model, and the modules that need explicit positions.

    Attributes:
        numbering: how whole sequences are numbered.
        padding_id: id of padding tokens, if these are numbered differently.
        inside: names of modules to which the model itself passes positions, and which need explicit ones. Empty: the
            model takes them.
    """

    numbering: Numbering = Numbering.BY_PLACE
    padding_id: int = 0
    inside: tuple[str, ...] = ()

    def of(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Positions in whole sequences: int64, [batch or 1, tokens].

        Args:
            tokens: ids [batch, tokens], or embeddings [batch, tokens, features] without padding.
            mask: [batch, tokens], 0 for padding; None without padding.
        """
        if self.numbering is Numbering.BY_MASK and mask is not None:
            return (mask.long().cumsum(1) * mask - 1).long()
        if self.numbering is Numbering.AFTER_PADDING and tokens.dim() == 2:
            real = tokens.ne(self.padding_id).long()
            return real.cumsum(1) * real + self.padding_id
        first = self.padding_id + 1 if self.numbering is Numbering.AFTER_PADDING else 0
        return torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]


def takes_positions(model: nn.Module) -> bool:
    """True if ``forward`` takes position ids."""
    return _ARGUMENT in inspect.signature(model.forward).parameters


def find_positions(model: nn.Module, call: Call, batch: Mapping[str, Any]) -> Positions:
    """Finds the numbering of ``model`` by calling it.

    Args:
        model: a Hugging Face model with values.
        call: calls the model.
        batch: arguments of a call without positions: padding tokens within sequences, and an attention mask.

    Raises:
        ValueError: no known numbering fits.
    """
    if not takes_positions(model):
        return _find_inside(model, call, batch)
    tokens, mask = batch["input_ids"], batch.get("attention_mask")
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    expected = call(dict(batch))[real]
    padding_id = getattr(model.config.get_text_config(), "pad_token_id", None)
    candidates = [Positions()]
    if isinstance(padding_id, int):
        candidates.append(Positions(Numbering.AFTER_PADDING, padding_id))
    candidates.append(Positions(Numbering.BY_MASK))
    for positions in candidates:
        try:
            found = call({**batch, _ARGUMENT: positions.of(tokens, mask).expand(len(tokens), -1)})[real]
        except (IndexError, RuntimeError):  # the model has no such position
            continue
        if (found - expected).abs().max() <= _CLOSE * expected.abs().max():
            return positions
    raise ValueError(
        f"{type(model).__name__} numbers the tokens of a sequence in a way that is not known, so that ranks cannot be "
        "told where their tokens are; leave sequence_parallel out, or give position_ids with each batch"
    )


class _Listener:
    """A hook that records the positions passed to a module."""

    def __init__(self, name: str):
        self.name = name
        self.heard: list[torch.Tensor] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _bound(module, args, kwargs).get(_ARGUMENT)
        if isinstance(given, torch.Tensor):
            self.heard.append(given)


def _find_inside(model: nn.Module, call: Call, batch: Mapping[str, Any]) -> Positions:
    """For a model that takes no positions: modules outside of the layers to which it passes positions."""
    modules = {name: module for name, module in _beside_layers(model) if takes_positions(module)}
    listeners = [_Listener(name) for name in modules]
    handles = [modules[each.name].register_forward_pre_hook(each, with_kwargs=True) for each in listeners]
    try:
        call(dict(batch))
    finally:
        for handle in handles:
            handle.remove()
    length = batch["input_ids"].shape[1]
    told = [each for each in listeners if each.heard]
    by_place = torch.arange(length, device="cpu")
    if all(torch.equal(one.reshape(-1, length)[0].cpu(), by_place) for each in told for one in each.heard):
        return Positions(inside=tuple(each.name for each in told))
    raise ValueError(
        f"{type(model).__name__} numbers the tokens of a sequence itself, and takes no position_ids, so that ranks "
        "cannot be told where their tokens are; leave sequence_parallel out"
    )


def _beside_layers(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules outside of any list of layers; activation checkpoints do not call these again in backward."""
    for name, child in model.named_children():
        if not isinstance(child, nn.ModuleList):
            yield prefix + name, child
            yield from _beside_layers(child, f"{prefix}{name}.")


class TellPositions:
    """Hooks that pass this rank's positions, in context-parallel calls, to the modules named in ``positions``. Shapes
    are those of the replaced positions.
    """

    def __init__(self, model: nn.Module, positions: Positions):
        modules = dict(model.named_modules())
        self._handles: Sequence[RemovableHandle] = [
            modules[name].register_forward_pre_hook(self._tell, with_kwargs=True) for name in positions.inside
        ]

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _tell(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        call, given = running_call(), _bound(module, args, kwargs).get(_ARGUMENT)
        if call is None or not isinstance(given, torch.Tensor):
            return None
        told = call.positions.to(given.device, given.dtype)[0].expand(given.shape)
        names = list(inspect.signature(module.forward).parameters)
        if _ARGUMENT in kwargs:
            return args, {**kwargs, _ARGUMENT: told}
        index = names.index(_ARGUMENT)
        return (*args[:index], told, *args[index + 1 :]), kwargs


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """The arguments by name."""
    names = inspect.signature(module.forward).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}

"""Calls of a module that several ranks share: each rank's inputs, and the treatment of its output.

with calls.call(args, kwargs) as call:
    output = call.result(module(*call.args, **call.kwargs))
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from patrickstar.ranks.distributed import RankGroups
from patrickstar.sequence.group import HybridGroup, SequenceGroup


@dataclasses.dataclass
class ModuleCall:
    """One call of the module on this rank: its inputs, and the function for its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Callable[[Any], Any] = lambda output: output


class Calls(Protocol):
    """How an engine's ranks share the calls of its module."""

    sequence_group: SequenceGroup | HybridGroup | None
    """The ranks that share a sequence; None: each rank has whole sequences."""
    ranks_per_call: int
    """Number of ranks that are called with the same samples."""
    repeats_forwards: bool
    """True if a forward that ran out of memory can be run again. False if other ranks wait for it in the middle."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> contextlib.AbstractContextManager[ModuleCall]:
        """Wraps the user's call of the module, before its arguments are on the device."""
        ...

    def gather_tokens(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """All-gathers the tokens of ``tensor``, which has this rank's tokens along ``dim``."""
        ...

    def close(self) -> None:
        """Restores the model."""
        ...


class OwnCalls:
    """Calls that no other rank shares."""

    sequence_group: SequenceGroup | HybridGroup | None = None
    ranks_per_call = 1
    repeats_forwards = True

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> contextlib.AbstractContextManager[ModuleCall]:
        """The call with unchanged inputs."""
        return contextlib.nullcontext(ModuleCall(args, kwargs))

    def part(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> ModuleCall:
        """This rank's part of a call with ``batch`` samples: all of it."""
        return ModuleCall(args, kwargs)

    def gather_tokens(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns ``tensor``."""
        return tensor

    def close(self) -> None:
        """Does nothing."""


def check_same_batch(
    ranks: RankGroups, division: Sequence[tuple[int, ...]], tokens: torch.Tensor, what_they_share: str
) -> None:
    """Raises ValueError on all ranks unless the ranks that share calls are called with the same batch. One exchange.

    Args:
        ranks: of the run.
        division: groups of ranks that must have the same batch.
        tokens: of the call, [batch, tokens, ...].
        what_they_share: for the message ("share sequences").
    """
    is_summed = tokens.device.type == "cpu" and not tokens.is_floating_point()
    mine = f"{list(tokens.shape[:2])} with tokens that sum to {int(tokens.sum()) if is_summed else 0}"
    said = ranks.control.exchange(mine.encode(), "the batch that ranks share")
    for members in division:
        batches = {member: said[ranks.members.index(member)].decode(errors="replace") for member in members}
        if len(set(batches.values())) > 1:
            shown = "; ".join(f"rank {member} {batch}" for member, batch in batches.items())
            raise ValueError(
                f"ranks {list(members)} {what_they_share}, but were called with different batches ({shown}); give all "
                f"of them the same batch: of a sampler, num_replicas={len(division)} and rank // {len(members)}"
            )

"""Parameters of which each rank has one part, such as some of a mixture's experts.

    keep_part(param, part)       # before an engine is made of the module
    part_of(param).gather(...)   # all parts, on all ranks that have them

Parts are equal shares of the first dimension. A parameter is whole until its values move into chunks, and again when
its engine is closed. In between it has the shape of this rank's part; checkpoints and state dicts have whole tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

_ATTRIBUTE = "_patrickstar_part"


@dataclasses.dataclass(frozen=True)
class RankPart:
    """This rank's part of a parameter."""

    index: int
    """From 0 to ``count`` - 1, in rank order."""
    count: int
    """Number of parts, which divides the first dimension."""
    gather: Callable[[torch.Tensor], torch.Tensor]
    """Joins all ranks' parts, each a tensor on the CPU. Collective over the ranks that have the parts."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of this rank's part of ``whole``."""
        return whole.chunk(self.count)[self.index]

    def shape_of(self, whole: torch.Size) -> torch.Size:
        """Shape of a part of a tensor of the shape ``whole``."""
        return torch.Size((whole[0] // self.count, *whole[1:]))

    def shape_of_whole(self, part: torch.Size) -> torch.Size:
        """Shape of the tensor whose parts have the shape ``part``."""
        return torch.Size((part[0] * self.count, *part[1:]))


def keep_part(param: nn.Parameter, part: RankPart | None) -> None:
    """Lets engines made from now on keep ``part`` of ``param``; None: all ranks share it. All ranks must mark the same
    parameters.
    """
    setattr(param, _ATTRIBUTE, part)


def part_of(param: nn.Parameter) -> RankPart | None:
    """This rank's part; None: all ranks share the parameter."""
    return getattr(param, _ATTRIBUTE, None)

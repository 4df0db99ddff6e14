"""A model that takes several paths: a trunk, and towers that some batches need."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

HIDDEN, TOKENS = 64, 16
TOWERS = "abc"


class Towers(nn.Module):
    """A batch passes the towers that ``path`` names, in that order, then a trunk of checkpointed blocks. A capital
    letter ends the gradient behind its tower: the forward is the same, the backward is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(HIDDEN, HIDDEN)
        self.towers = nn.ModuleDict({name: nn.Sequential(*map(block, range(3))) for name in TOWERS})
        self.trunk = nn.ModuleList(block(index) for index in range(5))
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, path: str = "") -> torch.Tensor:
        hidden = self.stem(x)
        for name in path:
            seen = self.towers[name.lower()](x)
            hidden = hidden + (seen.detach() if name.isupper() else seen)
        for layer in self.trunk:
            hidden = hidden + checkpoint(layer, hidden, use_reentrant=False)
        return self.head(hidden).float().square().mean()


def block(_index: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))


def batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(2, TOKENS, HIDDEN, generator=generator)


def drawn_path(generator: random.Random) -> str:
    return "".join(name for name in generator.choice(["", "a", "b", "ab", "ba", "abc", "A", "bC"]))

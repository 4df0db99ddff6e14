"""A model that takes several paths: a trunk, and towers that some batches need."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.training import make_config

TOKENS = 16
TOWERS = "abc"


class Towers(nn.Module):
    """A batch passes the towers that ``path`` names, in that order, then a trunk of checkpointed blocks. A capital
    letter ends the gradient behind its tower: the forward is the same, the backward is not.
    """

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.stem = nn.Linear(hidden, hidden)
        self.towers = nn.ModuleDict({name: nn.Sequential(*(block(hidden) for _ in range(3))) for name in TOWERS})
        self.trunk = nn.ModuleList(block(hidden) for _ in range(5))
        self.head = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, path: str = "") -> torch.Tensor:
        hidden = self.stem(x)
        for name in path:
            seen = self.towers[name.lower()](x)
            hidden = hidden + (seen.detach() if name.isupper() else seen)
        for layer in self.trunk:
            hidden = hidden + checkpoint(layer, hidden, use_reentrant=False)
        return self.head(hidden).float().square().mean()


def block(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))


def batch(generator: torch.Generator, hidden: int = 64) -> torch.Tensor:
    return torch.randn(2, TOKENS, hidden, generator=generator)


def drawn_path(generator: random.Random) -> str:
    return "".join(name for name in generator.choice(["", "a", "b", "ab", "ba", "abc", "A", "bC"]))


def train_plain(paths: list[list[str]]) -> list[list[float]]:
    """Losses of plain PyTorch, whose steps take the mean over batches; ``paths``: by step, that of each batch."""
    torch.manual_seed(0)
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), **make_config("fp32")["optimizer"]["params"])
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in paths:
        optimizer.zero_grad()
        found = [model(batch(generator), path) for path in step]
        (torch.stack(found).sum() / len(step)).backward()
        losses.append([loss.item() for loss in found])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return losses

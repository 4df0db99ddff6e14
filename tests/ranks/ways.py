from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from patrickstar.runtime import initialize_engine
from tests.ranks.runs import rank_and_size
from tests.training import make_config

SMOOTH_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.01}
"""eps is so large that a gradient's rounding error stays as small in the update."""
NUM_BLOCKS = 6


@dataclasses.dataclass(frozen=True)
class Way:
    """One forward and backward: the blocks in order of use, and how they are used."""

    blocks: tuple[int, ...]
    checkpointed: bool = False
    cut_at: int | None = None
    """Backward stops before this index of ``blocks``: earlier blocks get no gradient through it."""
    experts: tuple[int, ...] = ()
    """Rows of the common mixture, each used as often as it is named."""


class Blocks(nn.Module):
    """Blocks in any order, a mixture whose experts are slices of one parameter, and a head."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.stem = nn.Linear(hidden, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))
            for _ in range(NUM_BLOCKS)
        )
        self.up = nn.Parameter(torch.randn(4, hidden, hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(4, hidden, hidden) / hidden**0.5)
        self.head = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        for index, block in enumerate(way.blocks):
            x = self.cut(x) if index == way.cut_at else x
            module = self.blocks[block]
            x = x + (checkpoint(module, x, use_reentrant=False) if way.checkpointed else module(x))
        x = self.cut(x) if way.cut_at == len(way.blocks) else x
        for expert in way.experts:
            x = x + torch.relu(x @ self.up[expert]) @ self.down[expert]
        return self.head(x).square().mean()

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach() + self.stem.bias


def random_way(generator: random.Random) -> Way:
    count = generator.randint(0, NUM_BLOCKS + 2)
    return Way(
        tuple(generator.randrange(NUM_BLOCKS) for _ in range(count)),
        generator.random() < 0.4,
        generator.randrange(count) if count and generator.random() < 0.3 else None,
        tuple(generator.randrange(4) for _ in range(generator.randint(0, 5))),
    )


def shorter(way: Way, generator: random.Random) -> Way:
    kept = [index for index in range(len(way.blocks)) if generator.random() < 0.6]
    return dataclasses.replace(
        way,
        blocks=tuple(way.blocks[index] for index in kept),
        cut_at=None if way.cut_at is None else sum(index < way.cut_at for index in kept),
        experts=way.experts[: generator.randint(0, len(way.experts))],
    )


@dataclasses.dataclass(frozen=True)
class Ways:
    steps: tuple[tuple[tuple[Way, ...], ...], ...]

    @classmethod
    def drawn(cls, seed: int, num_steps: int, num_ranks: int, accumulate: int, kinds: tuple[str, ...]) -> Ways:
        """Draws ways: two equal steps, after which there is a plan, precede every step in which each rank may diverge,
        as one of ``kinds`` says: "shorter", "other", or "one" rank alone.
        """
        generator = random.Random(seed)
        common = tuple(random_way(generator) for _ in range(accumulate))
        steps = []
        for step in range(num_steps):
            if step % 3 < 2:
                steps.append(tuple((way,) * num_ranks for way in common))
                continue
            kind = generator.choice(kinds)
            ways = []
            for way in common:
                draw = random_way if kind != "shorter" else lambda g, way=way: shorter(way, g)
                others = [draw(generator) for _ in range(num_ranks)]
                ways.append(tuple(others if kind != "one" else [*others[:1], *[way] * (num_ranks - 1)]))
            steps.append(tuple(ways))
            if generator.random() < 0.3:
                common = tuple(random_way(generator) for _ in range(accumulate))
        return cls(tuple(steps))


def batches(ways: Ways, hidden: int) -> list[list[list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [[torch.randn(4, hidden, generator=generator) for _ in ranks] for ranks in micro_batches]
        for micro_batches in ways.steps
    ]


def train_ways(
    all_ways: list[Ways], options: dict[str, Any], forgets_plans: bool = False, hidden: int = 16
) -> list[dict[str, Any]]:
    rank, size = rank_and_size()
    if size > 1:
        dist.init_process_group("gloo")
    found = []
    for ways in all_ways:
        torch.manual_seed(0)
        config = make_config("fp32", **{"default_chunk_size": 1200, "rank_timeout_seconds": 60, **options})
        config["optimizer"]["params"] = dict(SMOOTH_ADAM)
        engine, optimizer = initialize_engine(lambda: Blocks(hidden), 0, config)
        losses = []
        with engine:
            for micro_batches, data in zip(ways.steps, batches(ways, hidden), strict=True):
                optimizer.zero_grad()
                for by_rank, inputs in zip(micro_batches, data, strict=True):
                    loss = engine(inputs[rank], by_rank[rank])
                    engine.backward(loss / len(micro_batches))
                    losses.append(loss.item())
                optimizer.step()
                if forgets_plans:
                    engine._session.runtime.forget_plan()
            report = engine.report()
            found.append({"losses": losses, "state": engine.state_dict(), "report": report})
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
    return found


def train_ways_plain(ways: Ways, rank: int = 0, hidden: int = 16) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Blocks(hidden)
    optimizer = torch.optim.AdamW(module.parameters(), **SMOOTH_ADAM)
    losses = []
    for micro_batches, data in zip(ways.steps, batches(ways, hidden), strict=True):
        optimizer.zero_grad()
        for by_rank, inputs in zip(micro_batches, data, strict=True):
            for index, (way, x) in enumerate(zip(by_rank, inputs, strict=True)):
                loss = module(x, way)
                (loss / (len(by_rank) * len(micro_batches))).backward()
                if index == rank:
                    losses.append(loss.item())
        optimizer.step()
    return {"losses": losses, "state": {name: value.detach().clone() for name, value in module.state_dict().items()}}

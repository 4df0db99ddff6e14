"""Buffers that a forward changes have on all ranks the values that they have in DDP, in training and in evaluation."""

from typing import Any

import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.ranks.runs import rank_and_size
from tests.training import make_config

NUM_STEPS = 4


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 1)
        self.norm = nn.BatchNorm1d(16, affine=False)
        self.register_buffer("mean", torch.randn(16).bfloat16())
        self.register_buffer("largest", torch.zeros(4, 4, dtype=torch.float16).t())
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(16, dtype=torch.bool))
        self.register_buffer("nothing", torch.zeros(0, dtype=torch.bfloat16))
        self.register_buffer("replaced", torch.zeros(16))
        self.register_buffer("of_large_batches", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.7).add_(x.mean(0).to(self.mean.dtype))
            self.largest.copy_(torch.maximum(self.largest, x.amax(0).view(4, 4).to(self.largest.dtype)))
            self.count.add_(len(x))
            self.seen.logical_or_(x.amax(0) > 1.5)
            self.nothing.add_(1)
            self.replaced = 0.5 * self.replaced + x.mean(0)
            if len(x) > 2:
                self.of_large_batches += x.mean(0)
        return self.layer(self.norm(x) + self.mean.float() + self.replaced).square().mean()


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2 + rank, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def noted(model: nn.Module, loss: torch.Tensor) -> dict[str, Any]:
    return {"loss": loss.detach().clone(), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def change_buffers() -> list[dict[str, Any]]:
    """Losses and buffers after each step and each evaluation."""
    rank, _ = rank_and_size()
    config = make_config("fp32")
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
    engine, optimizer = initialize_engine(Statistics, 0, config)
    found = []
    with engine:
        for step in range(NUM_STEPS):
            loss = engine(batch_of(rank, step))
            engine.backward(loss)
            optimizer.step()
            found.append(noted(engine.module, loss))
            engine.eval()
            for _ in range(2):
                with torch.no_grad():
                    found.append(noted(engine.module, engine(batch_of(rank, step))))
            engine.train()
    return found


def change_buffers_plainly() -> list[list[dict[str, Any]]]:
    """DDP's rule in one process: before a forward each rank gets rank 0's buffers."""
    models = [Statistics(), Statistics()]
    found = [[], []]

    def forward(step: int) -> None:
        models[1].load_state_dict(models[0].state_dict())
        for rank, model in enumerate(models):
            found[rank].append(noted(model, model(batch_of(rank, step))))

    for step in range(NUM_STEPS):
        forward(step)
        for model in models:
            model.eval()
        forward(step)
        forward(step)
        for model in models:
            model.train()
    return found


def test_as_in_ddp():
    for found, expected in zip(run_ranks(2, change_buffers), change_buffers_plainly(), strict=True):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


class OwnMask(nn.Module):
    """Keeps a mask for the length of the last sequence, as rotary embeddings keep their tables."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mask", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.mask) != len(x):
            self.mask = torch.arange(float(len(x)))
        return (self.layer(x) * self.mask[:, None]).square().mean()


def keep_masks() -> torch.Tensor:
    rank, _ = rank_and_size()
    engine, optimizer = initialize_engine(OwnMask, 0, make_config("fp32"))
    with engine:
        for step in range(3):
            engine.backward(engine(torch.ones(2 + rank + step, 8)))
            optimizer.step()
        return engine.module.mask.clone()


def test_buffers_of_a_ranks_own_size_stay():
    for rank, mask in enumerate(run_ranks(2, keep_masks)):
        assert_same_bits(mask, torch.arange(4.0 + rank))

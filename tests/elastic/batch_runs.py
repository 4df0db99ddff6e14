"""Runs whose global batch changes, and their replay in plain PyTorch on one process."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar.elastic import (
    BatchRange,
    ElasticLoader,
    ElasticRun,
    ElasticSampler,
    LearningRateRule,
    Next,
    Orders,
    Rendezvous,
    ScaledRates,
)
from patrickstar.runtime import initialize_engine
from tests.elastic import runs
from tests.training import make_config

BATCHES = BatchRange(min=6, base=12, max=30, rule=LearningRateRule.SQUARE_ROOT, warmup_steps=3)
DECAY_STEPS, DECAY = 3, 0.9  # of the schedule
LR, MICRO_BATCH, SEED = 1e-2, 3, 1


def config(lr: float = LR) -> dict[str, Any]:
    found = make_config("fp32", default_chunk_size=16384, rank_timeout_seconds=60)
    found["optimizer"]["params"]["lr"] = lr
    return found


def follow(
    address: str | None,
    orders: dict[int, runs.Order],
    folder: str,
    num_steps: int,
    kill_at: int = -1,
    death: tuple[int, int] | None = None,
    redundancy: int = 1,
) -> dict[str, Any]:
    """Runs one process. ``orders``: ranks and batch, or None for a stop, by step. Its rank 0 gives them. ``death``: a
    process that dies, and its step; the others go on.
    """
    dies_at = death[1] if death is not None and os.environ["RANK"] == str(death[0]) else -1
    engine, optimizer = initialize_engine(runs.build, 0, config())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, DECAY_STEPS, DECAY)
    sampler = ElasticSampler(runs.NUM_SAMPLES, BATCHES, MICRO_BATCH, seed=SEED)
    rates = ScaledRates(optimizer, BATCHES, schedule)
    options = {"look_seconds": 1e-9, "rendezvous": address, "resize_options": {"folder": folder}}
    options["redundancy"] = None if death is None else redundancy
    kept = {"checkpoint": Path(folder, "checkpoint"), "checkpoint_seconds": 1e-9} if kill_at >= 0 else {}
    run = ElasticRun(engine, {"sampler": sampler, "rates": rates}, **options, **kept)
    result: dict[str, Any] = {"losses": {}, "seen": {}, "rates": {}, "batches": {}, "noise": {}, "parts": {}}
    while run.num_steps < num_steps:
        for micro_batches in ElasticLoader(runs.samples(), sampler):
            with run.step():
                step = run.num_steps
                if step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                result["rates"][step], result["batches"][step] = optimizer.param_groups[0]["lr"], sampler.global_batch
                losses, seen = [], []
                for indices, inputs, targets in micro_batches:
                    loss = nn.functional.mse_loss(engine(inputs), targets)
                    if step == dies_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    engine.backward(loss / len(micro_batches))
                    losses.append(loss.item())
                    seen.extend(indices.tolist())
                result["losses"][step], result["seen"][step] = losses, seen
                optimizer.step()
                result["parts"][step] = engine.gradient_parts
                rates.step()
                if kill_at >= 0:
                    Path(folder, f"seen-{step}-{run.rank}").write_text(" ".join(map(str, seen)))
                if run.rank == 0 and step + 1 in orders:
                    runs.give(Orders(Rendezvous.at(address).store), orders[step + 1])
                run.step_done(loss.item())
                result["noise"][step] = run.batch.noise.scale
            if run.next is not Next.TRAIN:
                return result
            if run.num_steps == num_steps:
                break
    run.end()
    result["state"] = {name: value.cpu().clone() for name, value in engine.state_dict().items()}
    result["num_samples"] = run.num_samples
    engine.close()
    return result


def replay(
    batches: dict[int, int], allowed: BatchRange = BATCHES, decay: float = DECAY, lr: float = LR
) -> dict[str, Any]:
    """The same steps in plain PyTorch: each epoch's permutation is cut into these batches, one after the other."""
    model = runs.build()
    optimizer = torch.optim.AdamW(model.parameters(), **config(lr)["optimizer"]["params"])
    _, inputs, targets = runs.samples().tensors
    epoch, cursor, num_samples, first, before, warmed = 0, 0, 0, 1.0, allowed.base, allowed.warmup_steps
    result: dict[str, Any] = {"losses": {}, "seen": {}, "rates": {}}

    def factor() -> float:
        target = (before / allowed.base) ** 0.5
        return first + (target - first) * (min(1.0, warmed / allowed.warmup_steps) if target > first else 1.0)

    for step, batch in sorted(batches.items()):
        if batch != before:
            first, before, warmed = factor(), batch, 0
        if cursor + batch > runs.NUM_SAMPLES:
            epoch, cursor = epoch + 1, 0
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + epoch)
        order = torch.randperm(runs.NUM_SAMPLES, generator=generator)[cursor : cursor + batch]
        cursor += batch
        rate = lr * decay ** (num_samples // allowed.base // DECAY_STEPS) * factor()
        num_samples, warmed = num_samples + batch, warmed + 1
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[order]), targets[order])
        loss.backward()
        optimizer.step()
        result["losses"][step], result["seen"][step], result["rates"][step] = loss.item(), order.tolist(), rate
    result["state"] = {name: value.detach() for name, value in model.state_dict().items()}
    result["num_samples"] = num_samples
    return result

"""Functions that processes of a run execute in which ranks are lost."""

import enum
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import patrickstar
from patrickstar import RankFailure
from patrickstar.elastic import (
    ElasticLoader,
    ElasticRun,
    ElasticSampler,
    Next,
    Orders,
    Rendezvous,
    ResizePhase,
    serve_rendezvous,
)
from patrickstar.integrations.accelerate import PatrickStarAccelerator
from patrickstar.ranks.run_secret import default_secret_file
from patrickstar.resize.copies import Copies
from patrickstar.runtime import initialize_engine
from tests.elastic.runs import GLOBAL_BATCH, NUM_SAMPLES, Order, build, give, samples, state_of
from tests.training import make_config


class Point(enum.Enum):
    """Where a rank is killed."""

    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    STEP = enum.auto()
    """Before the optimizer's step."""
    UPDATED = enum.auto()
    """After it, before the copies."""
    COPYING = enum.auto()
    """The run counts the step, and nothing is copied."""
    SENDING = enum.auto()
    """Own shards are copied, and none was sent."""
    COPIED = enum.auto()
    """After the copies."""


def die() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def survive(
    address: str,
    kills: dict[int, tuple[int, Point]],
    num_steps: int,
    log: str,
    redundancy: int | None = 1,
    checkpoint: str | None = None,
    plan: dict[int, Order] | None = None,
    kill_in: tuple[int, ResizePhase] | None = None,
    shards: str = "/dev/shm",
    precision: str = "fp32",
    global_batch: int = GLOBAL_BATCH,
) -> dict[str, Any]:
    """Runs one process of a run; ``kills`` gives the step and the point at which some processes die, ``plan`` orders by
    step, ``kill_in`` a process that dies in a phase of the first resize. ``checkpoint`` is a folder for checkpoints
    after each step. Each finished step is a line in a file of ``log``. Timeouts are longer than any test, so that a
    wait for a lost process does not end by one.
    """
    number = int(os.environ["RANK"])
    shards = shards.format(number)
    config = make_config(precision, default_chunk_size=16384, rank_timeout_seconds=3600)
    engine, optimizer = initialize_engine(build, int(os.environ["LOCAL_RANK"]), config)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    sampler = ElasticSampler(NUM_SAMPLES, global_batch, 3, seed=1)

    def note(phase: ResizePhase) -> None:
        if kill_in == (number, phase):
            die()

    run = ElasticRun(
        engine,
        {"schedule": schedule, "sampler": sampler},
        checkpoint=checkpoint,
        checkpoint_seconds=1e-9,
        look_seconds=1e-9,
        redundancy=redundancy,
        rendezvous=address,
        resize_options={"folder": shards, "timeout_seconds": 3000.0, "note_phase": note},
    )
    result: dict[str, Any] = {"attempts": [], "end": None}
    written = Path(log, str(number))

    def at(point: Point) -> None:
        if kills.get(number) == (run.num_steps, point):
            die()

    def copying(*arguments: Any) -> None:
        at(Point.COPYING)
        take(*arguments)

    def sending(*arguments: Any) -> dict[str, Any]:
        at(Point.SENDING)
        return rest(*arguments)

    take, rest = Copies.take, Copies._copy_rest
    Copies.take, Copies._copy_rest = copying, staticmethod(sending)
    try:
        while run.num_steps < num_steps and run.next is Next.TRAIN:
            for micro_batches in ElasticLoader(samples(), sampler):
                step = run.num_steps
                with run.step():
                    result["attempts"].append(step)
                    line: dict[str, Any] = {"step": step, "losses": [], "seen": []}
                    optimizer.zero_grad()
                    for indices, inputs, targets in micro_batches:
                        at(Point.FORWARD)
                        loss = nn.functional.mse_loss(engine(inputs).float(), targets)
                        at(Point.BACKWARD)
                        engine.backward(loss / len(micro_batches))
                        line["losses"].append(loss.item())
                        line["seen"].extend(indices.tolist())
                    at(Point.STEP)
                    optimizer.step()
                    line["recoveries"] = run._recoveries
                    with written.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    at(Point.UPDATED)
                    schedule.step()
                    if run.rank == 0 and plan and step + 1 in plan and result["attempts"].count(step) == 1:
                        give(Orders(Rendezvous.at(address).store), plan[step + 1])
                    run.step_done(loss.item())
                    at(Point.COPIED)
                if run.next is not Next.TRAIN or run.num_steps == num_steps:
                    break
    except RankFailure as error:
        return {**result, "end": "failed", "error": str(error)}
    result |= {"number": number, "num_lost": run.num_lost, "num_ranks": run.num_ranks, "end": run.next}
    if run.next is Next.LEAVE:
        return result
    run.end()
    result["state"] = state_of(engine, optimizer)
    engine.close()
    return result


def survive_across_nodes(address: str, port: int, *arguments: Any, **options: Any) -> dict[str, Any]:
    """:func:`survive`, with a rendezvous that process 0 serves; it must not die."""
    store = serve_rendezvous(address, port) if os.environ["RANK"] == "0" else None
    while not default_secret_file(address, port).exists():
        time.sleep(0.05)
    try:
        return survive(f"{address}:{port}", *arguments, **options)
    finally:
        time.sleep(2)  # others may still read from the store
        del store


def survive_in_another_script(address: str, kind: str) -> dict[int, list[float]]:
    """Losses by step of a script with ``patrickstar.initialize`` or Accelerate, in which rank 1 of several dies."""
    dies = os.environ["RANK"] == "1"
    shared = {"default_chunk_size": 16384, "rank_timeout_seconds": 60}
    model, owner = build(), None
    if kind == "initialize":
        batches = {"train_batch_size": GLOBAL_BATCH, "train_micro_batch_size_per_gpu": 2}
        config = {**shared, **batches, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        engine, *_ = patrickstar.initialize(model=model, config=config)
    else:
        owner = PatrickStarAccelerator(cpu=True, patrickstar_config=shared)
        engine, optimizer = owner.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    sampler = ElasticSampler(NUM_SAMPLES, GLOBAL_BATCH, 2, seed=1)
    run = ElasticRun(owner or engine, {"sampler": sampler}, look_seconds=1e-9, rendezvous=address, redundancy=1)
    losses: dict[int, list[float]] = {}
    for micro_batches in ElasticLoader(samples(), sampler):
        with run.step():
            step = run.num_steps
            losses[step] = []
            for number, (_, inputs, targets) in enumerate(micro_batches):
                loss = nn.functional.mse_loss(engine(inputs), targets)
                losses[step].append(loss.item())
                if dies and (step, number) == (2, 1):
                    die()
                if owner is None:
                    engine.backward(loss)
                    engine.step()
                else:
                    owner.backward(loss / len(micro_batches))
            if owner is not None:
                optimizer.step()
                optimizer.zero_grad()
            run.step_done(loss.item())
        if run.num_steps == 4:
            break
    run.end()
    return losses

"""One step with everything resident against plain PyTorch on the same model.

Both train the same Hugging Face GPT-2 on the same batches: plain PyTorch with ``torch.optim.AdamW(fused=True)``, and
the engine without a device budget. Each has its own process, since in one process they would disturb each other's
memory. They take turns of a few steps; the waiting process is idle. The ratio is the median over the turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from benchmark.common import GptShape, provenance, synchronize, token_batch
from benchmark.systems import ADAMW
from patrickstar.runtime import initialize_engine

GOAL = 1.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8, help="timed turns of each")
    parser.add_argument("--steps", type=int, default=4, help="steps per turn")
    text = "bf16: plain PyTorch keeps float32 masters and casts"
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help=text)


def _plain(shape: GptShape, args: argparse.Namespace) -> Callable[[dict], None]:
    model = shape.build().to(_device())
    masters = list(model.parameters())
    if args.precision == "bf16":
        masters = [torch.nn.Parameter(p.detach().clone()) for p in masters]
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)

    def step(data: dict) -> None:
        optimizer.zero_grad()
        model(**data).loss.backward()
        if args.precision == "bf16":
            for master, param in zip(masters, model.parameters(), strict=True):
                master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        if args.precision == "bf16":
            with torch.no_grad():
                for master, param in zip(masters, model.parameters(), strict=True):
                    param.copy_(master)

    return step


def _ours(shape: GptShape, args: argparse.Namespace) -> Callable[[dict], None]:
    config = {"optimizer": {"type": "AdamW", "params": ADAMW}, "bf16": {"enabled": args.precision == "bf16"}}
    engine, optimizer = initialize_engine(lambda: shape.build(), 0, config | {"steps_per_print": 0})
    engine.train()

    def step(data: dict) -> None:
        optimizer.zero_grad()
        engine.backward(engine(**data).loss)
        optimizer.step()

    return step


SYSTEMS = {"torch": _plain, "patrickstar": _ours}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _shape(args: argparse.Namespace) -> GptShape:
    return GptShape(args.hidden, args.layers, args.hidden // 64, args.vocab, args.seq_len, checkpointing=False)


def _work(system: str, args: argparse.Namespace, connection: Connection) -> None:
    """Trains as many steps as each number received, and sends their seconds back. 0 ends the process."""
    torch.manual_seed(0)
    shape = _shape(args)
    step = SYSTEMS[system](shape, args)
    generator = torch.Generator().manual_seed(1)
    while num_steps := connection.recv():
        seconds = []
        for _ in range(num_steps):
            data = {key: value.to(_device()) for key, value in token_batch(shape, args.batch_size, generator).items()}
            begin = time.perf_counter()
            step(data)
            synchronize()
            seconds.append(time.perf_counter() - begin)
        connection.send(seconds)


def run(args: argparse.Namespace) -> dict:
    """Median seconds of both systems' steps. Each system's first turn is its warm-up."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else the waiting process's threads spin
    context = multiprocessing.get_context("spawn")
    workers, connections = [], {}
    for system in SYSTEMS:
        connections[system], remote = context.Pipe()
        workers.append(context.Process(target=_work, args=(system, args, remote), daemon=True))
        workers[-1].start()
        remote.close()
    turns: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for turn in range(args.turns + 1):
        for system in SYSTEMS if turn % 2 else reversed(SYSTEMS):
            connections[system].send(args.steps)
            seconds = statistics.median(connections[system].recv())
            if turn > 0:
                turns[system].append(seconds)
    for system, worker in zip(SYSTEMS, workers, strict=True):
        connections[system].send(0)
        worker.join()
    ratios = sorted(ours / plain for ours, plain in zip(turns["patrickstar"], turns["torch"], strict=True))
    return {
        "case": "overhead", "step_ratio_vs_torch": statistics.median(ratios), "least_step_ratio_vs_torch": ratios[0],
        "greatest_step_ratio_vs_torch": ratios[-1], "step_seconds": statistics.median(turns["patrickstar"]),
        "torch_step_seconds": statistics.median(turns["torch"]), "num_parameters": _shape(args).num_parameters(),
        "precision": args.precision, "batch": args.batch_size, "length": args.seq_len, **provenance(),
    }  # fmt: skip


def format_table(result: dict) -> str:
    return (
        f"GPT of {result['num_parameters'] / 1e6:.1f} M parameters, {result['precision']}, batch {result['batch']} x "
        f"{result['length']} tokens, {result['num_cpus']} cores, GPU {result['gpu']}\n"
        f"plain PyTorch  {result['torch_step_seconds']:.4f} s per step\n"
        f"PatrickStar    {result['step_seconds']:.4f} s per step\n"
        f"ratio          {result['step_ratio_vs_torch']:.3f} (goal at most {GOAL}; turns from "
        f"{result['least_step_ratio_vs_torch']:.3f} to {result['greatest_step_ratio_vs_torch']:.3f})"
    )

"""PatrickStar's training steps one by one: time, counts of the engine's work, and the bounds of some steps.

The benchmark's model, batches and optimizer, as in ``benchmark.compare``, in this process. Lines go to standard error
while it runs, so that a run that ends early leaves its figures.

* seconds: of one step, synchronised at its end.
* predicted: the engine's prediction of the next step; 0 before it has measured a step.
* The rest is counted by ``benchmark.step_counts``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmark.common import SHAPES, model_flops, provenance, show, synchronize, token_batch
from benchmark.step_counts import counts, in_words, levels, since
from patrickstar.command.flags import memory_size
from patrickstar.config import Master, Speculation, States

if TYPE_CHECKING:
    from benchmark.systems import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradients, 0: no clipping")
    parser.add_argument(
        "--trace", type=int, nargs="*", default=[], metavar="STEP", help="print what bounds these steps (from 0)"
    )


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of model, batches and engine, for :func:`make_job`."""
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step and rank")
    parser.add_argument("--seq-len", type=int, help="tokens per sequence (default: the model's)")
    parser.add_argument("--device-memory", type=memory_size, metavar="SIZE", help="(default: what is free)")
    parser.add_argument("--host-memory", type=memory_size, metavar="SIZE", help="of a rank (default: what is free)")
    parser.add_argument("--speculation", choices=[member.value for member in Speculation], default="auto")
    parser.add_argument("--states", choices=[member.value for member in States], default="fp32")
    parser.add_argument("--master", choices=[member.value for member in Master], default="exact")
    parser.add_argument("--further", type=json.loads, default={}, metavar="JSON", help="keys of the configuration")


def make_job(args: argparse.Namespace, clipping: float) -> Job:
    """The job of :func:`add_engine_arguments`'s flags, on the ranks that torchrun started."""
    from benchmark.systems import Job

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    host_bytes = None if args.host_memory is None else args.host_memory * ranks
    return Job(
        system="patrickstar", model=args.model, ranks=ranks, length=args.seq_len or SHAPES[args.model].length,
        batch=args.batch_size, clipping=clipping, speculation=args.speculation, states=args.states, master=args.master,
        gpu_bytes=args.device_memory, host_bytes=host_bytes, warmup=0, steps=args.steps,
    )  # fmt: skip


def timed_step(engine: Any, optimizer: Any, tokens: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Seconds of one training step, with a synchronisation before and after it, and its loss."""
    synchronize()
    begin = time.perf_counter()
    optimizer.zero_grad()
    loss = engine(**tokens).loss
    engine.backward(loss)
    value = loss.item()
    del loss
    optimizer.step()
    synchronize()
    return time.perf_counter() - begin, value


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains. The rows are steps."""
    from benchmark.ranks import training_device
    from benchmark.systems.patrickstar import training_options
    from benchmark.systems.weights import build_job_model
    from patrickstar.profiling.summary import summarize
    from patrickstar.runtime import initialize_engine

    job = make_job(args, args.clip)
    config = training_options(job).engine_config() | args.further
    device = training_device()
    begin = time.perf_counter()
    engine, optimizer = initialize_engine(lambda: build_job_model(job), device.index or 0, config)
    init_seconds = time.perf_counter() - begin
    show(f"initialised in {init_seconds:.1f} s")
    engine.train()
    generator = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", "0")))
    rows: list[dict[str, Any]] = []
    texts = {}
    before = counts(engine)
    for step in range(args.steps):
        tokens = {name: value.to(device) for name, value in token_batch(job.shape, job.batch, generator).items()}
        if step in args.trace:
            engine._session.runtime.start_trace()
        seconds, value = timed_step(engine, optimizer, tokens)
        row = {"step": step, "seconds": seconds, "loss": value}
        trace = engine._session.runtime.take_trace()
        now, report = counts(engine), engine.report()
        row |= {"predicted": report["predicted_step_seconds"], "norm": report["grad_norm"]}
        row |= since(before, now) | levels(engine)
        before = now
        rows.append(row)
        show(_line(row))
        if trace:
            texts[step] = summarize(trace).text(step)
            show(texts[step])
    report = engine.report()
    engine.discard()
    median = statistics.median(row["seconds"] for row in rows[len(rows) // 2 :])
    return {
        "case": "steps", "model": args.model, "ranks": job.ranks, "batch": args.batch_size,
        "init_seconds": init_seconds,
        "median_of_second_half": median, "model_tflops": model_flops(job.shape, job.batch) / median / 1e12,
        "config": config, "rows": rows, "traces": texts, "report": report, **provenance(),
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    norm = [] if row["norm"] is None else [f"norm {row['norm']:.4f}"]
    begin = [f"step {row['step']}: {row['seconds']:.3f} s, predicted {row['predicted']:.3f}, loss {row['loss']:.4f}"]
    return ", ".join(begin + norm + in_words(row))


def format_table(result: dict[str, Any]) -> str:
    """All steps, and the bounds of traced steps."""
    report = result["report"]
    lines = [
        f"{result['model']}, {result['ranks']} ranks, batch {result['batch']} each: median of the second half "
        f"{result['median_of_second_half']:.3f} s, {result['model_tflops']:.1f} model TFLOPS; initialised in "
        f"{result['init_seconds']:.1f} s; {report['num_device_state_chunks']} of {report['num_chunks']} chunks have "
        f"their states on the device; peaks {report['device_peak_bytes'] / 2**30:.1f} GiB of it, "
        f"{report['host_peak_bytes'] / 2**30:.1f} GiB of the host",
        *(_line(row) for row in result["rows"]),
        *result["traces"].values(),
    ]
    return "\n".join(lines)

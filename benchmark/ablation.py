"""Gain of each mechanism of the core: steps without it beside steps with all, in turns, in one process.

The benchmark's model, batches and optimizer, as in ``benchmark.steps``. Each engine is built anew, trains ``--warmup``
steps in which it measures and plans, and is timed over ``--steps``. One engine before them is not counted, since a
process's first steps are slower. The first and the last one have all mechanisms: how far they differ is the noise.
``--clip-acting`` runs a second round in which clipping acts in every step.

* seconds: median of the timed steps, with a synchronisation at the end of each; spread: their quartiles.
* ratio: to the mean of the engines that have all mechanisms; above 1, the mechanism makes steps shorter.
* up, down, early, behind ...: of the last step, as ``benchmark.step_counts`` counts them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
import unittest.mock
from typing import Any

import torch

from benchmark.common import provenance, token_batch
from benchmark.step_counts import counts, in_words, levels, since
from benchmark.steps import add_engine_arguments, make_job, timed_step
from patrickstar import _C

# Its switch is the choice of the layout.
_IN_PLACE = "values_in_place"
_MECHANISMS = [*(name.lower() for name in _C.Mechanism.__members__), _IN_PLACE]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--warmup", type=int, default=7, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=6, help="steps that are timed")
    parser.add_argument("--without", nargs="*", choices=_MECHANISMS, default=_MECHANISMS, metavar="MECHANISM")
    parser.add_argument("--clip-acting", nargs="*", choices=_MECHANISMS, metavar="MECHANISM",
                        help="these once more, where clipping acts")  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains; the rows are engines."""
    rows = []
    _measure(args, 1e6, None)
    rounds = [("harmless", 1e6, args.without)]
    if args.clip_acting is not None:
        rounds.append(("acting", 1e-3, args.clip_acting))
    for clipping, largest_norm, mechanisms in rounds:
        base = []
        measured = []
        for without in [None, *mechanisms, None]:
            row = {"clipping": clipping, "without": without} | _measure(args, largest_norm, without)
            (measured if without else base).append(row)
            print(_line(row), file=sys.stderr, flush=True)
        mean = statistics.fmean(row["seconds"] for row in base)
        rows += [row | {"ratio": row["seconds"] / mean} for row in [*base, *measured]]
    return {
        "case": "ablation", "model": args.model, "batch": args.batch_size, "device_memory": args.device_memory,
        "host_memory": args.host_memory, "rows": rows, **provenance(),
    }  # fmt: skip


def _measure(args: argparse.Namespace, largest_norm: float, without: str | None) -> dict[str, Any]:
    from benchmark.systems.device import training_device
    from benchmark.systems.patrickstar import training_options
    from benchmark.systems.weights import build_job_model
    from patrickstar.runtime import initialize_engine

    job = make_job(args, largest_norm)
    config = training_options(job).engine_config() | args.further
    device = training_device()
    member = _C.Mechanism.__members__.get((without or "").upper())
    _C.leave_out([] if member is None else [member])
    begin = time.perf_counter()
    with _without_values_in_place() if without == _IN_PLACE else contextlib.nullcontext():
        engine, optimizer = initialize_engine(lambda: build_job_model(job), device.index or 0, config)
    engine.train()
    generator = torch.Generator().manual_seed(1)
    seconds = []
    losses = []
    init_seconds = time.perf_counter() - begin
    try:
        for step in range(args.warmup + args.steps):
            tokens = {name: value.to(device) for name, value in token_batch(job.shape, job.batch, generator).items()}
            before = counts(engine)
            duration, loss = timed_step(engine, optimizer, tokens)
            losses.append(loss)
            if step >= args.warmup:
                seconds.append(duration)
        found = since(before, counts(engine)) | levels(engine)
        found |= {"predicted": engine.report()["predicted_step_seconds"], "norm": engine.report()["grad_norm"]}
    finally:
        engine.discard()
        _C.leave_out([])
    low, median, high = statistics.quantiles(seconds, n=4)
    spread = {"seconds": median, "low": low, "high": high, "all_seconds": seconds}
    return {"init_seconds": init_seconds, **spread, "losses": losses, **found}


def _without_values_in_place() -> Any:
    return unittest.mock.patch("patrickstar.machine.state_scheme.may_put_values_in_place", lambda *_: False)


def _line(row: dict[str, Any]) -> str:
    without = f"without {row['without']}" if row["without"] else "all mechanisms"
    ratio = f", {row['ratio']:.3f} x" if "ratio" in row else ""
    parts = [
        f"clipping {row['clipping']}, {without}: {row['seconds']:.3f} s ({row['low']:.3f} to {row['high']:.3f}){ratio}",
        f"initialised in {row['init_seconds']:.1f} s",
        f"predicted {row['predicted']:.3f}",
        f"loss {row['losses'][-1]:.6f}",
    ]
    return ", ".join([*parts, *in_words(row)])


def format_table(result: dict[str, Any]) -> str:
    """One line for each engine."""
    return "\n".join(_line(row) for row in result["rows"])

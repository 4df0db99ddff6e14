"""Gain of each mechanism of the core: steps without it beside steps with all, in turns, in one process.

The benchmark's model, batches and optimizer, as in ``benchmark.steps``. One engine trains ``--warmup`` steps, measures
and plans. Then comes a series for each mechanism: a plan without it, ``--settling`` steps, ``--steps`` timed steps.
Series with all mechanisms come first, last, and between; their differences are the noise. ``--clip-acting`` does the
same with another engine, whose clipping acts in every step. ``--from-start`` leaves a mechanism out of all steps of an
engine of its own, since some mechanisms act before the first series.

* seconds: median of the timed steps, each synchronised at its end; spread: their quartiles.
* ratio: to the mean of the series with all mechanisms; above 1, the mechanism makes steps shorter.
* up, down, early, behind ...: of the series, as ``benchmark.step_counts`` counts them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import unittest.mock
from typing import TYPE_CHECKING, Any

import torch

from benchmark.common import provenance, show, token_batch
from benchmark.step_counts import counts, in_words, levels, since
from benchmark.steps import add_engine_arguments, make_job, timed_step
from patrickstar import _C

if TYPE_CHECKING:
    from collections.abc import Iterator

_IN_PLACE = "values_in_place"  # switched off by the choice of the layout
_SWITCHES = [name.lower() for name in _C.Mechanism.__members__]
_MECHANISMS = [*_SWITCHES, _IN_PLACE]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--warmup", type=int, default=8, help="steps of an engine before the first series")
    parser.add_argument("--settling", type=int, default=4, help="steps of a series before those that are timed")
    parser.add_argument("--steps", type=int, default=8, help="steps of a series that are timed")
    parser.add_argument("--base-every", type=int, default=4, help="series without one, between those with all")
    parser.add_argument("--without", nargs="*", choices=_SWITCHES, default=_SWITCHES, metavar="MECHANISM")
    parser.add_argument("--from-start", nargs="*", choices=_MECHANISMS, default=[_IN_PLACE], metavar="MECHANISM")
    parser.add_argument("--clip-acting", nargs="*", choices=_SWITCHES, metavar="MECHANISM",
                        help="also where clipping acts")  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains. The rows are series of steps."""
    rounds = [("harmless", 1e6, args.without)]
    if args.clip_acting is not None:
        rounds.append(("acting", 1e-3, args.clip_acting))
    rows = []
    for clipping, largest_norm, mechanisms in rounds:
        with _engine(args, largest_norm) as steps:
            steps.take(args.warmup)
            for without in _in_turns(mechanisms, args.base_every):
                rows.append({"clipping": clipping, "without": without} | steps.measure(without))
                show(_line(rows[-1]))
        for without in args.from_start:
            with _left_out(without), _engine(args, largest_norm) as steps:
                steps.take(args.warmup)
                rows.append({"clipping": clipping, "without": without} | steps.measure(without))
                show(_line(rows[-1]))
        base = [row["seconds"] for row in rows if row["clipping"] == clipping and not row["without"]]
        for row in rows:
            if row["clipping"] == clipping:
                row["ratio"] = row["seconds"] / statistics.fmean(base)
    return {
        "case": "ablation", "model": args.model, "batch": args.batch_size, "device_memory": args.device_memory,
        "host_memory": args.host_memory, "rows": rows, **provenance(),
    }  # fmt: skip


def _in_turns(mechanisms: list[str], base_every: int) -> list[str | None]:
    """None (all mechanisms) first and last, and after every ``base_every`` mechanisms."""
    series: list[str | None] = [None]
    for number, name in enumerate(mechanisms, 1):
        series += [name, None] if number % base_every == 0 else [name]
    return series if series[-1] is None else [*series, None]


class _Steps:
    """Training steps of one engine."""

    def __init__(self, args: argparse.Namespace, engine: Any, optimizer: Any, job: Any, device: torch.device) -> None:
        self.args, self.engine, self.optimizer, self.job, self.device = args, engine, optimizer, job, device
        self.generator = torch.Generator().manual_seed(1)
        self.loss = 0.0

    def take(self, count: int) -> list[float]:
        """Seconds of each of ``count`` steps."""
        seconds = []
        for _ in range(count):
            batch = token_batch(self.job.shape, self.job.batch, self.generator)
            tokens = {name: value.to(self.device) for name, value in batch.items()}
            duration, self.loss = timed_step(self.engine, self.optimizer, tokens)
            seconds.append(duration)
        return seconds

    def measure(self, without: str | None) -> dict[str, Any]:
        """Steps without one mechanism, after a plan without it."""
        with _left_out(without):
            self.engine._session.runtime.plan_anew()
            self.take(self.args.settling)
            before = counts(self.engine)
            seconds = self.take(self.args.steps)
            found = since(before, counts(self.engine)) | levels(self.engine)
            report = self.engine.report()
        low, median, high = statistics.quantiles(seconds, n=4)
        found |= {"predicted": report["predicted_step_seconds"], "norm": report["grad_norm"], "loss": self.loss}
        return {"seconds": median, "low": low, "high": high, "least": min(seconds), "all_seconds": seconds} | found


@contextlib.contextmanager
def _engine(args: argparse.Namespace, largest_norm: float) -> Iterator[_Steps]:
    from benchmark.ranks import training_device
    from benchmark.systems.patrickstar import training_options
    from benchmark.systems.weights import build_job_model
    from patrickstar.runtime import initialize_engine

    job = make_job(args, largest_norm)
    config = training_options(job).engine_config() | args.further
    device = training_device()
    engine, optimizer = initialize_engine(lambda: build_job_model(job), device.index or 0, config)
    engine.train()
    try:
        yield _Steps(args, engine, optimizer, job, device)
    finally:
        engine.discard()


@contextlib.contextmanager
def _left_out(mechanism: str | None) -> Iterator[None]:
    """Leaves a mechanism (None: none) out within the block.

    In-place speculative updates are left out only of engines that are created within it.
    """
    in_place = "patrickstar.machine.state_scheme.may_put_values_in_place"
    others = [] if mechanism in (None, _IN_PLACE) else [_C.Mechanism.__members__[mechanism.upper()]]
    patch: Any = unittest.mock.patch(in_place, lambda *_: False) if mechanism == _IN_PLACE else contextlib.nullcontext()
    _C.leave_out(others)
    try:
        with patch:
            yield
    finally:
        _C.leave_out([])


def _line(row: dict[str, Any]) -> str:
    without = f"without {row['without']}" if row["without"] else "all mechanisms"
    ratio = f", {row['ratio']:.3f} x" if "ratio" in row else ""
    parts = [
        f"clipping {row['clipping']}, {without}: {row['seconds']:.3f} s ({row['low']:.3f} to {row['high']:.3f}){ratio}",
        f"least {row['least']:.3f}",
        f"predicted {row['predicted']:.3f}",
        f"loss {row['loss']:.6f}",
    ]
    return ", ".join([*parts, *in_words(row)])


def format_table(result: dict[str, Any]) -> str:
    return "\n".join(_line(row) for row in result["rows"])

"""Gain of a search over placements of optimizer states: predicted steps of other placements beside the heuristics'.

A placement is the chunks that have their states on the GPU, which heuristics choose (csrc/plan/placement.h). Here every
count of chunks is tried, from the first on, from the last on and evenly spread. Budgets, layout, updates ahead of the
step and the choice of the plan are an engine's own for each of them. Nothing is measured on a GPU.

* own: chunks and seconds of the heuristics' placement; -1, +1: seconds with one of the first chunks less or more.
* fits: the shortest step of all placements that the planner finds room for.
* kept: the same of those that take no more of the GPU than the heuristics would for states at most, so that as much is
  left to prefetches, gradients and slots.
* careful: of these, the one chosen as plans are ([Note: caution], csrc/plan/plan_choice.cpp), and its gain on a machine
  whose transfers and host updates are 1.5 times slower.
* plan: seconds of ``patrickstar plan`` with the same chunks, which tries smaller budgets.
* A sweep plans with more and more memory: how much longer a step is at worst than with less.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmark.common import provenance
from benchmark.placed_jobs import GIB, JOBS, Job, Placed, predictor_of
from patrickstar import _C
from patrickstar.planning.machines import H200
from patrickstar.planning.shortest_step import ShortestStep
from patrickstar.sizes import show_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from patrickstar.planning.prediction import Case

# Beside compute, as many times slower as plans are compared with (kCaution).
_CAUTION = 1.5
SLOWER = dataclasses.replace(
    H200,
    upload_gbps=H200.upload_gbps / _CAUTION,
    download_gbps=H200.download_gbps / _CAUTION,
    transfer_latency_seconds=H200.transfer_latency_seconds * _CAUTION,
    host_adam_gparams=H200.host_adam_gparams / _CAUTION,
    host_threads=int(H200.host_threads / _CAUTION),
    nvlink_gather_gbps=H200.nvlink_gather_gbps / _CAUTION,
    nvlink_scatter_gbps=H200.nvlink_scatter_gbps / _CAUTION,
)


def chosen_chunks(order: str, count: int, num_chunks: int) -> list[int]:
    """So many chunks: the first, the last, or evenly spread."""
    if order == "last":
        return list(range(num_chunks - 1, num_chunks - 1 - count, -1))
    return list(range(count)) if order == "first" else [index * num_chunks // count for index in range(count)]


@dataclasses.dataclass(frozen=True)
class Found:
    """A placement and its predicted step."""

    seconds: float
    order: str
    count: int
    state_bytes: int
    chosen: tuple[int, ...] | None
    """None: as the heuristics place them."""


class Search:
    """Placements of one job, laid out as an engine does on H200s."""

    def __init__(self, job: Job, known: dict[Any, Placed] | None = None):
        self.job = job
        self.setting, self.usual = predictor_of(job, {} if known is None else known)
        self.num_chunks = len(self.usual.chunks)
        self._bytes = [chunk["home_bytes"] for chunk in self.usual.chunks]

    def seconds(self, case: Case | None) -> float | None:
        """Length of a step; None: it does not fit."""
        return None if case is None else (case.clipped_step if self.job.acting else case.step).seconds

    def slow_seconds(self, found: Found) -> float:
        """The same placement on :data:`SLOWER`."""
        return self.seconds(self.usual.on(SLOWER).place(self.setting, found.chosen)) or math.inf

    def own(self) -> Found | None:
        """The heuristics' placement; None: it does not fit."""
        case = self.usual.place(self.setting, None)
        if case is None:
            return None
        there = [size for size, chunk in zip(self._bytes, case.plan.chunks, strict=True) if chunk.states_on_device]
        return Found(self.seconds(case), "own", len(there), sum(there), None)

    def candidates(self, order: str, counts: Iterable[int]) -> Iterator[Found]:
        """Placements of the counts that the budgets hold, ascending."""
        refused = None
        for count in counts:
            chosen = tuple(chosen_chunks(order, count, self.num_chunks))
            seconds = self.seconds(self.usual.place(self.setting, chosen))
            if seconds is not None:
                yield Found(seconds, order, count, sum(self._bytes[chunk] for chunk in chosen), chosen)
                refused = 0
            elif refused is not None and (refused := refused + 1) == 4:
                return

    def most_bytes(self) -> int:
        """States that heuristics put on the GPU at most, for the host's sake."""
        budget = self.usual.device_budget(self.setting)
        budget.host_limit_bytes = 0
        return sum(self._bytes[: self.usual.num_state_chunks(self.setting, budget)])


def carefully(steps: Iterable[tuple[float, float, Found]]) -> tuple[float, float, Found]:
    """The least step of those that are the shortest on a slower machine, as far as the simulator can tell. Steps are
    (seconds, seconds on the slower machine, placement).
    """
    steps = list(steps)
    longest = min(slow for _, slow, _ in steps) * (1 + _C.PREDICTION_TOLERANCE)
    return min((step for step in steps if step[1] <= longest), key=lambda step: step[0])


def measure(name: str, stride: int) -> dict[str, Any]:
    """A job's own placement beside all others; of the last and of spread chunks, every so many
    counts."""
    search = Search(JOBS[name])
    own = search.own()
    if own is None:
        raise ValueError(f"{name}: the budgets do not hold it")
    found, times = [own], [time.perf_counter()]
    search.own()
    times.append(time.perf_counter())
    for order, step in (("first", 1), ("spread", stride), ("last", stride)):
        found += search.candidates(order, range(0, search.num_chunks + 1, step))
    times.append(time.perf_counter())
    most = max(search.most_bytes(), own.state_bytes)
    kept = [one for one in found if one.state_bytes <= most]
    careful = carefully((one.seconds, search.slow_seconds(one), one) for one in kept)
    by_count = {one.count: one.seconds for one in found if one.order == "first"}
    return {
        "job": name, "chunks": search.num_chunks, "own": own, "fits": min(found, key=_seconds),
        "kept": min(kept, key=_seconds), "careful": careful[2], "slow_gain": search.slow_seconds(own) / careful[1],
        "around": [by_count.get(own.count - 1), by_count.get(own.count + 1)],
        "plan_seconds": search.seconds(ShortestStep(search.usual).choose(search.setting)), "choices": len(found),
        "one_choice_seconds": times[1] - times[0], "search_seconds": times[2] - times[1], "found": found,
    }  # fmt: skip


def sweep(name: str, memory: str, budgets: int) -> dict[str, Any]:
    """Steps within more and more memory of the GPU or the host: the heuristics' own, and the shortest of placements
    with the same shares of the chunks at each budget.
    """
    known: dict[Any, Placed] = {}
    search, rows = Search(JOBS[name], known), []
    setting = search.setting
    low, high = search.usual.least_device_bytes(setting), int(138.3 * GIB)
    if memory == "host":
        low, high = _C.initial_placement(search.usual.layout, 0, setting.device_bytes // 2)[1], 4 * setting.host_bytes
    for index in range(budgets):
        amount = low + (high - low) * index // (budgets - 1)
        at = Search(dataclasses.replace(JOBS[name], **{f"{memory}_gib": amount / GIB}), known)
        own = at.own()
        if own is None:
            continue
        counts = sorted({*range(6), *(at.num_chunks * part // 24 for part in range(25))})
        most = max(at.most_bytes(), own.state_bytes)
        kept = [one.seconds for one in at.candidates("first", counts) if one.state_bytes <= most]
        rows.append((amount, own.seconds, min([own.seconds, *kept])))
    rises = {kind: rise([(row[0], row[column]) for row in rows]) for column, kind in ((1, "own"), (2, "kept"))}
    return {"job": name, "memory": memory, "rows": rows, "rises": rises}


def _seconds(found: Found) -> float:
    return found.seconds


def rise(steps: Sequence[tuple[int, float]]) -> tuple[float, int, int]:
    """By (budget, seconds), budgets ascending: how much longer a step is at worst than with less, with how much, and
    at how many budgets it is longer than the simulator's tolerance.
    """
    least, worst, number = math.inf, (0.0, 0), 0
    for budget, seconds in steps:
        least = min(least, seconds)
        worst = max(worst, (seconds / least - 1, budget))
        number += seconds > least * (1 + _C.PREDICTION_TOLERANCE)
    return (*worst, number)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", nargs="*", choices=JOBS, default=list(JOBS), metavar="JOB")
    parser.add_argument("--stride", type=int, default=4, help="between counts of the last and of spread chunks")
    parser.add_argument("--sweep", nargs="*", choices=JOBS, default=[], metavar="JOB")
    parser.add_argument("--memory", choices=["device", "host"], default="device", help="what grows in a sweep")
    parser.add_argument("--budgets", type=int, default=40, help="of a sweep")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plans; the rows are jobs."""
    rows, sweeps = [], []
    for name in args.jobs:
        rows.append(measure(name, args.stride))
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    for name in args.sweep:
        sweeps.append(sweep(name, args.memory, args.budgets))
        print(_sweep_line(sweeps[-1]), file=sys.stderr, flush=True)
    return {"case": "placement", "rows": rows, "sweeps": sweeps, **provenance()}


def _line(row: dict[str, Any]) -> str:
    own = row["own"]

    def gain(found: Found) -> str:
        return f"{found.order:>6} {found.count:3} {own.seconds / found.seconds:6.3f} x"

    around = " ".join(f"{seconds:6.3f}" if seconds else "     -" for seconds in row["around"])
    return (
        f"{row['job']:25} {own.count:3} of {row['chunks']:3} {own.seconds:6.3f}  {around}  {gain(row['fits'])}  "
        f"{gain(row['kept'])}  {gain(row['careful'])} {row['slow_gain']:6.3f} x  "
        f"{row['plan_seconds']:6.3f}  {row['choices']:5} {row['one_choice_seconds']:5.2f} {row['search_seconds']:6.1f}"
    )


def _sweep_line(found: dict[str, Any]) -> str:
    return f"{found['job']:25} {found['memory']:6} {len(found['rows']):3}  " + "  ".join(
        f"{worst:6.2%} at {show_size(budget):>8}, {number:2} times" for worst, budget, number in found["rises"].values()
    )


def format_table(result: dict[str, Any]) -> str:
    """A line per job, and per sweep."""
    lines = []
    if result["rows"]:
        kinds = "  ".join(f"{kind:>19}" for kind in ("fits", "kept", "careful"))
        lines = [f"{'job':25} {'own':>10}  seconds      -1     +1  {kinds}   slower    plan  choices   one    all"]
        lines += [_line(row) for row in result["rows"]]
    if result["sweeps"]:
        lines.append(f"{'longer with more memory':32} of  " + f"{'own':30}  kept")
        lines += [_sweep_line(found) for found in result["sweeps"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmark.placement", description=__doc__.splitlines()[0])
    add_arguments(parser)
    print(format_table(run(parser.parse_args())))


if __name__ == "__main__":
    main()

"""Schedulers on six kinds of trace: a matrix of simulations that is run in parts, and its table of goals.

    python -m benchmark.ones_matrix run matrix.jsonl --seeds 0-19
    python -m benchmark.ones_matrix report matrix.jsonl
    python -m benchmark.ones_matrix run types.jsonl --cluster types --mixes artifact,bursts,diurnal --seeds 0-9

``run`` skips what the file has, so it can be ended and started again. Simulated time: no GPU, one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from patrickstar.ones import (
    MIXES,
    POLICIES,
    TYPED_POOLS,
    Cluster,
    Result,
    figures,
    make_history,
    make_policy,
    make_trace,
    on_types,
    simulate,
)
from patrickstar.ones.policies.ones import Ones
from patrickstar.ones.pools import total
from patrickstar.ones.report import mean_and_interval

OURS, TRUTH, POLLUX, SIA, TIRESIAS = "ones", "ones-true-lengths", "pollux-like", "sia-like", "tiresias"
PROFILED, GAVEL = "sia-like-profiled", "gavel"
CLUSTERS: Mapping[str, Mapping[str, Cluster]] = {"equal": {"": Cluster(64)}, "types": TYPED_POOLS}
_Cell = tuple[str, float, str, int]
"""Mix, seconds of a resize, policy, seed."""


def _unfinished_at_most(result: Result) -> list[str]:
    """Names of the jobs that were there when the most were there at once."""
    return max(
        ([job.job for job in result.jobs if job.arrival_s <= at.arrival_s < job.end_s] for at in result.jobs), key=len
    )


def _simulated(cell: _Cell, pools: Mapping[str, Cluster], earlier_jobs: int) -> dict[str, float]:
    mix, resize_s, name, seed = cell
    trace = make_trace(mix, seed, resize_s=resize_s)
    if len(pools) > 1:
        trace = on_types(trace, list(pools))
    past = make_history(mix, seed, earlier_jobs, total(pools), resize_s) if earlier_jobs else ()
    policy = make_policy(name, seed, past)
    result = simulate(trace, policy, pools)
    found = dataclasses.asdict(figures(result))
    if isinstance(policy, Ones):
        there = set(_unfinished_at_most(result))
        jobs = [item.job for item in trace if item.job.name in there]  # at the worst all are in one pool
        found["bound_s"] = max(policy.longest_wait_s(jobs, pool) for pool in pools.values())
    return found


def _read(path: Path) -> dict[_Cell, dict[str, float]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row.pop("mix"), row.pop("resize_s"), row.pop("policy"), row.pop("seed")): row for row in rows}


def run(path: Path, cells: Sequence[_Cell], pools: Mapping[str, Cluster], earlier_jobs: int) -> None:
    """Adds the missing cells to the file."""
    there = _read(path)
    with path.open("a", encoding="utf-8") as file:
        for cell in cells:
            if cell not in there:
                head = dict(zip(("mix", "resize_s", "policy", "seed"), cell, strict=True))
                file.write(json.dumps({**head, **_simulated(cell, pools, earlier_jobs)}) + "\n")
                file.flush()


def report(path: Path) -> str:
    """Means over seeds with 95 % intervals, ratios seed by seed, and the goals."""
    cells = _read(path)
    policies = sorted({cell[2] for cell in cells}, key=list(POLICIES).index)
    seeds = sorted({cell[3] for cell in cells})
    mixes = sorted({cell[0] for cell in cells}, key=list(MIXES).index)
    lines = [f"{len(seeds)} seeds ({seeds[0]} to {seeds[-1]}), 64 GPUs", ""]
    for cost in sorted({cell[1] for cell in cells}):
        for mix in mixes:
            lines += [f"{mix}, {cost:g} s per resize:", f"{'policy':<19}{'mean JCT s':>17}{'p99 s':>18}"]
            lines[-1] += f"{'x pollux-like':>17}{'x sia-like':>17}{'x -profiled':>17}{'x gavel':>17}"
            lines[-1] += f"{'x tiresias':>17}{'p99 x pollux':>17}{'resizes':>9}{'wait s':>8}"
            for policy in policies:
                lines.append(_line(cells, mix, cost, policy, seeds))
            lines.append("")
    return "\n".join(lines + _goals(cells, seeds, mixes))


def _line(cells: dict, mix: str, cost: float, policy: str, seeds: Sequence[int]) -> str:
    rows = [cells[mix, cost, policy, seed] for seed in seeds if (mix, cost, policy, seed) in cells]
    line = f"{policy:<19}" + _shown([row["mean_jct_s"] for row in rows], 1).rjust(17)
    line += _shown([row["p99_jct_s"] for row in rows], 0).rjust(18)
    for rival in (POLLUX, SIA, PROFILED, GAVEL, TIRESIAS):
        line += _shown(_ratios(cells, mix, cost, (policy, rival), "mean_jct_s", seeds), 3).rjust(17)
    line += _shown(_ratios(cells, mix, cost, (policy, POLLUX), "p99_jct_s", seeds), 3).rjust(17)
    line += f"{statistics.mean(row['resizes_per_job'] for row in rows):.1f}".rjust(9)
    return line + f"{max(row['longest_wait_s'] for row in rows):.0f}".rjust(8)


def _ratios(cells: dict, mix: str, cost: float, pair: tuple[str, str], key: str, seeds: Sequence[int]) -> list[float]:
    found = [[cells.get((mix, cost, policy, seed)) for policy in pair] for seed in seeds]
    return [ours[key] / other[key] for ours, other in found if ours and other]


def _goals(cells: dict, seeds: Sequence[int], mixes: Sequence[str]) -> list[str]:
    lines = ["Goals, by means of ratios over seeds:"]
    for cost in sorted({cell[1] for cell in cells}):
        table = {
            mix: [
                statistics.mean(_ratios(cells, mix, cost, (OURS, rival), key, seeds) or [math.inf])
                for rival, key in (
                    (POLLUX, "mean_jct_s"), (TIRESIAS, "mean_jct_s"), (POLLUX, "p99_jct_s"), (TRUTH, "mean_jct_s"),
                    (SIA, "mean_jct_s"), (PROFILED, "mean_jct_s"), (GAVEL, "mean_jct_s"),
                )
            ]
            for mix in mixes
        }  # fmt: skip
        ours = [row for cell, row in cells.items() if cell[1] == cost and cell[2] == OURS]
        for says, columns, most in (
            ("mean <= 0.9 x pollux-like", (0,), 0.9),
            ("mean <= 0.6 x tiresias", (1,), 0.6),
            ("mean <= 1.05 x the better of both", (0, 1), 1.05),
            ("p99 <= 1.1 x pollux-like", (2,), 1.1),
            ("mean <= 1.25 x true lengths", (3,), 1.25),
            ("mean <= sia-like", (4,), 1.0),
            ("mean <= sia-like-profiled", (5,), 1.0),
            ("mean <= gavel", (6,), 1.0),
        ):
            kinds = [mix for mix, row in table.items() if all(row[at] <= most for at in columns)]
            if all(math.isfinite(row[at]) for row in table.values() for at in columns):
                lines.append(f"{cost:>3g} s  {says:<34} {len(kinds)} of {len(table)} kinds: {', '.join(kinds)}")
        within = sum(row["longest_wait_s"] <= row["bound_s"] for row in ours)
        most = max(row["longest_wait_s"] / row["bound_s"] for row in ours)
        says = f"{within} of {len(ours)} runs, at most {most:.2f} of it"
        lines.append(f"{cost:>3g} s  {'waits within the bound':<34} {says}")
    return lines


def _shown(values: Sequence[float], decimals: int) -> str:
    if not values:
        return "-"
    mean, half = mean_and_interval(values)
    return f"{mean:.{decimals}f} ±{half:.{decimals}f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--cluster", choices=CLUSTERS, default="equal", help="64 equal GPUs, or of three types")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--seeds", default="0-19", help="first and last")
    parser.add_argument("--resize-s", default="5,30")
    parser.add_argument("--earlier-jobs", type=int, default=20, help="known to policies that learn; use one file each")
    options = parser.parse_args(arguments)
    if options.command == "run":
        first, last = map(int, options.seeds.split("-"))
        costs = [float(cost) for cost in options.resize_s.split(",")]
        policies, mixes = options.policies.split(","), options.mixes.split(",")
        cells = [(m, c, p, s) for s in range(first, last + 1) for m in mixes for c in costs for p in policies]
        run(options.file, cells, CLUSTERS[options.cluster], options.earlier_jobs)
    else:
        print(report(options.file))
    return 0


if __name__ == "__main__":
    sys.exit(main())

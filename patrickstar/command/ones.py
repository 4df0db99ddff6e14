"""``patrickstar ones``: elastic scheduling of training jobs, on Ray or simulated (docs/guides/ones.md)."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from patrickstar.command.flags import CommandParser, at_least_0, at_least_1, not_negative, positive, run_reporting
from patrickstar.command.ones_cluster import add_cluster_commands
from patrickstar.ones import (
    MIXES,
    POLICIES,
    Cluster,
    PublicFormat,
    Result,
    TraceJob,
    draw_gantt,
    draw_jcts,
    figures,
    make_history,
    make_policy,
    make_trace,
    on_types,
    read_public_trace,
    read_trace,
    simulate,
    table,
    write_trace,
)
from patrickstar.ones.pools import total
from patrickstar.ones.traces import with_resize_s


def main(arguments: Sequence[str] | None = None, prog: str = "python -m patrickstar.ones") -> int:
    """Returns the exit status: 0; 2 for a wrong argument or trace."""
    options = _make_parser(prog).parse_args(arguments)
    return run_reporting(prog, functools.partial(options.run, options))


def _make_parser(prog: str) -> CommandParser:
    parser = CommandParser(prog, "Shares a cluster among training jobs that change their number of GPUs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    simulating = commands.add_parser("simulate", help="run schedulers on simulated time and compare them")
    simulating.add_argument(
        "--policies", type=_policies, default=tuple(POLICIES), metavar="NAMES",
        help=f"separated by commas, of {', '.join(POLICIES)} (default: all)",
    )  # fmt: skip
    simulating.add_argument("--gpus", type=at_least_1, default=64, help="of the cluster")
    simulating.add_argument("--gpus-per-node", type=at_least_1, default=4, help="of a node")
    simulating.add_argument(
        "--gpu-types", type=_pools, metavar="TYPES",
        help="GPUs of several types in place of --gpus, as T4:24x4,V100:24x8: 24 of each, in nodes of 4 and of 8",
    )  # fmt: skip
    simulating.add_argument("--seeds", type=_seeds, default=(0,), help="traces generated: 20 for 0 to 19, or 5-9")
    simulating.add_argument("--trace", type=Path, metavar="FILE", help="this trace instead of generated ones")
    simulating.add_argument(
        "--resize-s", type=_costs, metavar="SECONDS",
        help="seconds of a resize, several separated by commas (default: the trace's, 5 in generated ones)",
    )  # fmt: skip
    _add_mix(simulating)
    simulating.add_argument("--compare-to", metavar="POLICY", help="one of the policies, for the table's last column")
    simulating.add_argument("--pictures", type=Path, metavar="FOLDER", help="write PNGs: JCTs, and a Gantt chart each")
    simulating.add_argument("--json", action="store_true", help="print the figures of each simulation as JSON lines")
    simulating.set_defaults(run=_simulate)

    writing = commands.add_parser("trace", help="write a generated or a public trace as JSON lines")
    writing.add_argument("file", type=Path, help="what to write")
    writing.add_argument("--seed", type=at_least_0, default=0, help="of the trace")
    _add_mix(writing)
    writing.add_argument("--public", type=Path, metavar="LOG", help="arrivals, GPUs and lengths of a public trace")
    writing.add_argument(
        "--format", choices=[kind.value for kind in PublicFormat], default=PublicFormat.PHILLY.value,
        help="columns of the public trace",
    )  # fmt: skip
    writing.set_defaults(run=_write)
    add_cluster_commands(commands)
    return parser


def _add_mix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mix", choices=MIXES, default="artifact", help="what jobs are generated")
    parser.add_argument("--jobs", type=at_least_1, help="generated per trace (default: the mix's)")
    parser.add_argument("--mean-gap-s", type=positive, metavar="SECONDS", help="between arrivals (default: the mix's)")


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"there is no policy {name!r}; choose among {', '.join(POLICIES)}")
    return tuple(dict.fromkeys(names))


def _pools(text: str) -> dict[str, Cluster]:
    found = {}
    for word in text.split(","):
        kind, _, numbers = word.partition(":")
        gpus, _, per_node = numbers.partition("x")
        if not kind or kind in found or not gpus.isdecimal() or not per_node.isdecimal():
            raise argparse.ArgumentTypeError(f"it is {text!r}; give each type once, as T4:24x4,V100:24x8")
        found[kind] = Cluster(int(gpus), int(per_node))
    return found


def _costs(text: str) -> tuple[float, ...]:
    return tuple(not_negative(word) for word in text.split(","))


def _seeds(text: str) -> tuple[int, ...]:
    first, _, last = text.rpartition("-")
    if not last.isdecimal() or (first and not first.isdecimal()):
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a number of seeds, or the first and the last as 5-9")
    found = range(int(first), int(last) + 1) if first else range(int(last))
    if not found:
        raise argparse.ArgumentTypeError(f"it is {text!r}, which is no seed; give at least one")
    return tuple(found)


def _generated(options: argparse.Namespace, seed: int) -> tuple[TraceJob, ...]:
    return make_trace(options.mix, seed, options.jobs, options.mean_gap_s)


def _write(options: argparse.Namespace) -> int:
    if options.public is None:
        trace = _generated(options, options.seed)
    else:
        trace = read_public_trace(options.public, PublicFormat(options.format), options.seed, options.jobs)
    write_trace(options.file, trace)
    print(f"{len(trace)} jobs written to {options.file}")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    pools = options.gpu_types or {"": Cluster(options.gpus, options.gpus_per_node)}
    if options.compare_to is not None and options.compare_to not in options.policies:
        raise ValueError(f"--compare-to {options.compare_to} is none of --policies {','.join(options.policies)}")
    if options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
    if options.trace is not None:
        traces = [read_trace(options.trace)]
        options.seeds = options.seeds[:1]
        if not traces[0]:
            raise ValueError(f"{options.trace} has no jobs; give a trace with at least one")
    else:
        traces = [_generated(options, seed) for seed in options.seeds]
        if options.gpu_types:
            traces = [on_types(trace, list(pools)) for trace in traces]
    for cost in options.resize_s or (None,):
        found: dict[str, list[Result]] = {name: [] for name in options.policies}
        for seed, trace in zip(options.seeds, traces, strict=True):
            jobs = trace if cost is None else with_resize_s(trace, cost)
            past = make_history(options.mix, seed, cluster=total(pools), resize_s=jobs[0].job.resize_s)
            for name in options.policies:
                found[name].append(simulate(jobs, make_policy(name, seed, past), pools))
                if options.json:
                    made = dataclasses.asdict(figures(found[name][-1]))
                    head = {"mix": options.mix, "policy": name, "seed": seed, "resize_s": cost}
                    print(json.dumps({**head, **made}), flush=True)
        _show(options, total(pools).num_gpus, cost, found)
    return 0


def _show(options: argparse.Namespace, num_gpus: int, cost: float | None, found: dict[str, list[Result]]) -> None:
    what = "the trace's resize costs" if cost is None else f"{cost:g} s per resize"
    if not options.json:
        print(f"{num_gpus} GPUs, {what}:\n{table(found, options.compare_to)}\n", flush=True)
    if options.pictures is not None:
        suffix = "" if cost is None else f"-{cost:g}s"
        draw_jcts(found, options.pictures / f"jct{suffix}.png")
        for name, runs in found.items():
            draw_gantt(runs[0], options.pictures / f"gantt-{name}{suffix}.png", f"{name}, {what}")


if __name__ == "__main__":
    sys.exit(main())

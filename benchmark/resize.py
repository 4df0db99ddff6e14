"""Resizes of a running job, to more ranks and back, beside the same change by checkpoint and restart.

A language model trains on some processes, each with the GPU of its LOCAL_RANK where there is one. Others wait in
``Engine.join``. All train four steps after each change.

* seconds: from the first call of ``Engine.resize`` to the last return, over all processes.
* by phase (``patrickstar.elastic.ResizePhase``): the slowest process in each phase, so the phases may sum to more than
  the whole; a joining process waits in the first two.
* bytes: of shards sent between processes.
* restart: ``save_checkpoint`` on the old ranks; then, from the start of new processes, their start, imports,
  initialisation and ``load_checkpoint``; the whole is all of it.

Lines of the processes go to stderr as they arrive.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmark.common import SHAPES, provenance
from benchmark.launch import launch, rank_environment
from benchmark.resize_worker import Job
from patrickstar.elastic import ResizePhase, serve_rendezvous

_WORKER = "benchmark.resize_worker"
_RESTARTS = {"none": (), "up": ("up",), "both": ("up", "down")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, default="0.1b")
    parser.add_argument("--length", type=int, help="tokens per sequence (default: the model's)")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--from", dest="few", type=int, default=1, help="ranks at first")
    parser.add_argument("--to", dest="many", type=int, default=2, help="ranks after the first resize")
    parser.add_argument("--steps", type=int, default=4, help="before the first resize")
    parser.add_argument("--chunk-numel", type=int, help="elements per chunk (default: the engine's)")
    parser.add_argument("--device-memory", metavar="SIZE", help="device_memory of each rank (default: what is free)")
    parser.add_argument("--host-memory", metavar="SIZE", help="host_memory of each rank (default: what is free)")
    parser.add_argument("--states", choices=("fp32", "bf16", "8bit"), default="fp32")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--states-on-host", action="store_true", help="all optimizer states rest on the host")
    parser.add_argument("--restart", choices=_RESTARTS, default="up", help="which changes are also made by restart")
    parser.add_argument("--checkpoint-folder", help="for the checkpoint (default: a temporary one)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each set of processes")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Resizes, then restarts from checkpoints."""
    if args.many <= args.few:
        raise SystemExit(f"--to is {args.many} and --from is {args.few}; give more ranks to change to")
    result: dict[str, Any] = {
        "case": "resize", "model": args.model, "ranks": [args.few, args.many],
        "device": "cuda" if torch.cuda.is_available() else "cpu", "config": _config(args), "failures": [],
        "resizes": [], "restarts": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=args.checkpoint_folder) as made:
        wanted = _RESTARTS[args.restart]
        few, many = str(Path(made, "few")), str(Path(made, "many"))
        lines = _run(args, result, folder, kind="resize", ranks=args.many, saves=few if wanted else "")
        result["num_parameters"] = next((line["num_parameters"] for line in lines if "num_parameters" in line), 0)
        result["before_seconds"] = _steps(lines, "before")
        for direction in ("up", "down"):
            if any(line.get("direction") == direction for line in lines):
                result["resizes"].append(_resize(lines, direction))
        for direction in wanted if not result["failures"] else ():
            loads, saves = (few, many if "down" in wanted else "") if direction == "up" else (many, "")
            ranks = args.many if direction == "up" else args.few
            saved = lines
            lines = _run(args, result, folder, kind="restart", ranks=ranks, loads=loads, saves=saves)
            if not result["failures"]:
                result["restarts"].append(_restart(saved, lines, direction))
    return {**result, **provenance()}


def _config(args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}, "states": args.states},
        "steps_per_print": 0,
        "plan_cache": False,
        "rank_timeout_seconds": 280,
    }
    given = {
        "bf16": {"enabled": True} if args.precision == "bf16" else None,
        "default_chunk_size": args.chunk_numel,
        "device_memory": args.device_memory,
        "host_memory": args.host_memory,
    }
    config |= {key: value for key, value in given.items() if value is not None}
    if args.states_on_host:
        config["optimizer"]["params"]["use_hybrid_adam"] = False
    return config


def _run(
    args: argparse.Namespace, result: dict[str, Any], folder: str, *, kind: str, ranks: int, loads: str = "", saves: str
) -> list[dict[str, Any]]:
    """All lines of the processes; a failure is added to the result."""
    store = serve_rendezvous("127.0.0.1", 0)
    job = Job(
        kind=kind, ranks=ranks, few=args.few, model=args.model, length=args.length or SHAPES[args.model].length,
        batch=args.batch, steps=args.steps, config=_config(args), rendezvous=f"127.0.0.1:{store.port}",
        started=time.time(), loads=loads, saves=saves, folder=folder,
    )  # fmt: skip
    environment = rank_environment if kind == "restart" else functools.partial(_elastic_environment, args.few)
    lines: list[dict[str, Any]] = []

    def take(rank: int, line: dict[str, Any]) -> None:
        lines.append(line)
        print(json.dumps(line), file=sys.stderr, flush=True)

    failure = launch(_WORKER, job, timeout_seconds=args.timeout, take=take, environment=environment)
    if failure is not None:
        result["failures"].append(f"{kind}: {failure}")
        print(f"{failure.log_tail}\n{kind} failed: {failure}", file=sys.stderr, flush=True)
    return lines


def _elastic_environment(few: int, number: int, num_processes: int, port: int) -> dict[str, str]:
    """For one of the first ranks, or for a joining process, which begins alone."""
    if number < few:
        return {**rank_environment(number, few, port), "OMP_NUM_THREADS": _threads(num_processes)}
    alone = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": _threads(num_processes)}
    return rank_environment(number, num_processes, port) | alone


def _threads(num_processes: int) -> str:
    return rank_environment(0, max(num_processes, 2), 0)["OMP_NUM_THREADS"]


def _steps(lines: list[dict[str, Any]], when: str) -> list[float]:
    """Seconds of each step on the slowest process."""
    of_each = [line["seconds"] for line in lines if line["event"] == "steps" and line["when"] == when]
    return [max(seconds) for seconds in zip(*of_each, strict=True)]


def _resize(lines: list[dict[str, Any]], direction: str) -> dict[str, Any]:
    said = [line for line in lines if line["event"] == "resized" and line["direction"] == direction]
    took_part = said + [line for line in lines if line.get("direction") == "join" and direction == "up"]
    names = [phase.name.lower() for phase in ResizePhase]
    return {
        "direction": direction,
        "seconds": max(line["end"] for line in took_part) - min(line["begin"] for line in said),
        "phases": {name: max(line["phases"].get(name, 0.0) for line in said) for name in names},
        "joining_phases": {
            name: max((line["phases"].get(name, 0.0) for line in took_part if line not in said), default=0.0)
            for name in names
        },
        "total_bytes": said[0]["total_bytes"],
        "step_seconds": _steps(lines, f"after the resize {direction}"),
    }


def _restart(saved: list[dict[str, Any]], lines: list[dict[str, Any]], direction: str) -> dict[str, Any]:
    def most(of: list[dict[str, Any]], what: str, key: str) -> float:
        return max(line[key] for line in of if line["event"] == what)

    parts = {
        "save": most(saved, "saved", "seconds"),
        "start": most(lines, "imported", "start"),
        "imports": most(lines, "imported", "imports"),
        "initialise": most(lines, "initialised", "seconds"),
        "load": most(lines, "loaded", "seconds"),
    }
    return {
        "direction": direction,
        "seconds": parts["save"] + most(lines, "loaded", "since_start"),
        "parts": parts,
        "step_seconds": _steps(lines, "after the restart"),
    }


def format_table(result: dict[str, Any]) -> str:
    few, many = result["ranks"]
    rows = [
        f"{result['model']}, {result['num_parameters'] / 1e6:.0f} M parameters, {few} to {many} ranks on "
        f"{result['device']}; steps before: {_seconds(result['before_seconds'])}"
    ]
    arrows = {"up": f"{few} -> {many}", "down": f"{many} -> {few}"}
    for resize in result["resizes"]:
        rows.append(
            f"resize {arrows[resize['direction']]}: {resize['seconds']:.3f} s, {resize['total_bytes'] / 1e9:.2f} GB "
            f"sent; steps after: {_seconds(resize['step_seconds'])}"
        )
        rows.append("  old ranks: " + _parts(resize["phases"]))
        if any(resize["joining_phases"].values()):
            rows.append("  joining: " + _parts(resize["joining_phases"]))
    for restart in result["restarts"]:
        rows.append(
            f"restart {arrows[restart['direction']]}: {restart['seconds']:.3f} s; steps after: "
            f"{_seconds(restart['step_seconds'])}"
        )
        rows.append("  " + _parts(restart["parts"]))
    rows += [f"failed: {reason}" for reason in result["failures"]]
    return "\n".join(rows)


def _parts(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())


def _seconds(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values) + " s"

"""PatrickStar and its peers on the same model with equal settings, in one call.

    python -m benchmark.compare --model 4.3b --batch 16 --gpu-mem 24GiB --gpu-mem fsdp2=all --json results.json

Each system trains in a fresh process, one after the other: a Hugging Face GPT-2 (sdpa, no dropout, untied output layer,
non-reentrant checkpointing) from the same values on the same batches, in bfloat16 with float32 masters, with AdamW. A
system that is not installed is named and skipped; of one that runs out of memory, is killed or takes too long the
reason is given. The others go on.

``--gpu-mem`` limits what PyTorch's allocator may reserve (PatrickStar: ``device_memory``); without a GPU it limits
PatrickStar's simulated device alone. ``--host-mem`` is PatrickStar's ``host_memory``; a peer has no such limit, its
process is ended when it exceeds it.

* step: median of the timed steps, each from the batch on the host to an idle GPU.
* model TFLOPS = (6 * parameters * tokens + 6 * layers * hidden * length * tokens) / step.
* device peak: what PyTorch's allocator reserved at most, host peak: resident memory of the process at most, pinned
  memory included; both since the process began.
* exposed: the part of a step in which the GPU computes nothing and waits for a transfer, for the host's optimizer or to
  be launched: step minus the time in which at least one kernel ran in one more step, which is profiled.
* ratio: the system's step over PatrickStar's, that is how many times as fast PatrickStar is.
* init: from imported packages and compiled kernels to a model that can train.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmark.common import SHAPES, command_line
from benchmark.compare_report import Comparison, format_table, plot
from benchmark.systems import SYSTEMS, Job
from benchmark.systems.launcher import run_system
from patrickstar.config import Speculation, Streaming, parse_bytes

_WHOLE_GPU = "all"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ``jobs`` has a job per system."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="SYSTEM", help=", ".join(SYSTEMS)
    )
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--length", type=int, help="tokens per sequence (default: the model's)")
    parser.add_argument(
        "--gpu-mem",
        action="append",
        default=[],
        metavar="[SYSTEM=]SIZE",
        help="limit on device memory, such as 24GiB, of all systems or of one; 'all' is the whole GPU (the default)",
    )
    parser.add_argument("--host-mem", help="limit on host memory, such as 100GiB (PatrickStar: its host budget)")
    parser.add_argument(
        "--speculation",
        choices=[member.value for member in Speculation],
        default=Speculation.AUTO.value,
        help="PatrickStar's optimizer.speculation; 'commit' updates in backward for good, as no peer does",
    )
    parser.add_argument(
        "--streaming",
        choices=[member.value for member in Streaming],
        default=Streaming.NEVER.value,
        help="PatrickStar's optimizer.streaming",
    )
    parser.add_argument("--clipping", type=float, default=0.0, help="largest norm of the gradients (0: no clipping)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="per system")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results, anew after each system")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="write a bar chart, .svg or .png")
    args = parser.parse_args(arguments)
    if min(args.batch, args.steps, args.length or 1) < 1 or args.warmup < 0:
        parser.error("--batch, --steps and --length must be at least 1, --warmup at least 0")
    try:
        args.jobs = _jobs(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _jobs(args: argparse.Namespace) -> list[Job]:
    limits = gpu_limits(args.gpu_mem, args.system)
    return [
        Job(
            system=system,
            model=args.model,
            length=args.length or SHAPES[args.model].length,
            batch=args.batch,
            clipping=args.clipping,
            speculation=args.speculation,
            streaming=args.streaming,
            gpu_bytes=limits[system],
            host_bytes=parse_bytes(args.host_mem, "--host-mem") if args.host_mem else None,
            warmup=args.warmup,
            steps=args.steps,
        )
        for system in dict.fromkeys(args.system)
    ]


def gpu_limits(values: list[str], systems: list[str]) -> dict[str, int | None]:
    """Device bytes of each system (None: the whole GPU) of ``SIZE`` and ``SYSTEM=SIZE`` arguments; a system's own one
    wins.

    Raises:
        ValueError: a size or a system is wrong.
    """
    common: int | None = None
    own: dict[str, int | None] = {}
    for value in values:
        system, separator, size = value.rpartition("=")
        num_bytes = None if size == _WHOLE_GPU else parse_bytes(size, "--gpu-mem")
        if not separator:
            common = num_bytes
        elif system in systems:
            own[system] = num_bytes
        else:
            raise ValueError(f"--gpu-mem {value}: {system!r} is not among the systems that run: {', '.join(systems)}")
    return {system: own.get(system, common) for system in systems}


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if a system trained."""
    args = parse_arguments(arguments)
    comparison = Comparison(command_line("benchmark.compare"))
    for job in args.jobs:
        run = run_system(job, timeout_seconds=args.timeout, log=_log)
        comparison.runs.append(run)
        if run.reason:
            _log(f"{job.system}: {run.outcome.value}: {run.reason}\n{run.log_tail}")
        if args.json is not None:
            _write_json(args.json, comparison.to_dict())
    print(format_table(comparison))
    if args.plot is not None:
        plot(comparison, args.plot)
    return 0 if any(run.is_measured for run in comparison.runs) else 1


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

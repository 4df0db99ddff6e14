"""PatrickStar and its peers on the same model with equal settings, in one call.

    python -m benchmark.compare --model 4.3b --device-memory 24GiB --device-memory fsdp2=all --json results.json
    python -m benchmark.compare --model 21b --ranks 4 --device-memory 24GiB --device-memory fsdp2=all --json r.json

Systems train one after the other, each in fresh processes: a model of Hugging Face (sdpa, no dropout, untied output
layer, non-reentrant checkpointing) from the same values on the same batches, in bfloat16 with float32 masters, with
AdamW. A system that is not installed is skipped. A system that runs out of memory, is killed or takes too long is
reported with the reason, and the others go on.

``--ranks`` is the number of processes that train together, each with its own GPU; each system runs with each of several
numbers. Every rank has ``--batch-size`` sequences per step, so more ranks do more work (weak scaling). Without a GPU
ranks use gloo.

``--device-memory`` limits what PyTorch's allocator may reserve on each rank (PatrickStar: ``device_memory``); without a
GPU it limits PatrickStar's simulated device alone. ``--host-memory`` is for all ranks together: PatrickStar's
``host_memory`` is a rank's part of it; a peer has no such limit, so its processes are killed when they exceed it.

* step: median of the timed steps, each from the batch on the host to an idle GPU, on rank 0; all ranks begin together.
* model TFLOPS = (6 * parameters * tokens + 6 * layers * hidden * length * tokens) / step, with the tokens of one rank.
  It is per GPU, as tokens/s are.
* scaling: TFLOPS over the same system's with the least number of ranks.
* device peak: the most that PyTorch's allocator reserved, on the rank with the highest. Host peak: peak resident memory
  of the process, pinned memory included; for several ranks the sum, with shared memory counted once. Both since the
  processes began.
* exposed: the part of a step in which the GPU does not compute: it waits for a transfer, for another rank, for the
  host's optimizer or for a launch. It is the step minus the time in which a kernel other than NCCL's ran in one more
  step of rank 0, which is profiled. Coll.: the part of that step in which only NCCL's kernels ran.
* ratio: the system's step over PatrickStar's on as many ranks: how many times as fast PatrickStar is.
* init: from imported packages and compiled kernels to a model that can train, on the slowest rank.
* losses: means over the ranks.
* with ``--clip``: the number of timed steps in which clipping acted.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmark.common import SHAPES, command_line, show
from benchmark.compare_report import Comparison, format_table
from benchmark.plot_results import plot
from benchmark.systems import COMPILED, KERNELS, SYSTEMS, Job
from benchmark.systems.run import run_system
from patrickstar.command.flags import CommandParser, at_least_0, memory_size
from patrickstar.config import Fp8Recipe, Master, Speculation, States
from patrickstar.sizes import parse_size_with_unit

_WHOLE_GPU = "all"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, with ``jobs``: one per number of ranks and system."""
    parser = CommandParser("python -m benchmark.compare", __doc__)
    parser.add_argument(
        "--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="SYSTEM", help=", ".join(SYSTEMS)
    )
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step and rank")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1], metavar="N", help="processes that train together, one per GPU"
    )
    parser.add_argument("--seq-len", type=int, help="tokens per sequence (default: the model's)")
    parser.add_argument(
        "--device-memory",
        action="append",
        default=[],
        metavar="[SYSTEM=]SIZE",
        help="limit on each rank's device memory, such as 24GiB, of all systems or of one; 'all' (the default): none",
    )
    parser.add_argument(
        "--host-memory",
        type=memory_size,
        metavar="SIZE",
        help="limit on host memory of all ranks together, such as 100GiB",
    )
    for flag, values, text in (
        ("speculation", Speculation, "; 'commit' is optimizer-in-backward, as in no peer"),
        ("states", States, "; peers keep float32"),
        ("master", Master, "; 'stochastic' keeps none, as in no peer"),
    ):
        names = [member.value for member in values]
        default = Job.__dataclass_fields__[flag].default
        parser.add_argument(f"--{flag}", choices=names, default=default, help=f"PatrickStar's optimizer.{flag}{text}")
    parser.add_argument(
        "--chunk-numel",
        type=int,
        default=Job.chunk_numel,
        metavar="N",
        help="PatrickStar's default_chunk_size, in elements",
    )
    parser.add_argument(
        "--fsdp2-recompute",
        type=at_least_0,
        metavar="N",
        help="blocks that FSDP2 recomputes, the first ones (default: all)",
    )
    parser.add_argument(
        "--fp8",
        choices=[member.value for member in Fp8Recipe],
        default=Job.fp8,
        help="recipe of patrickstar-fp8 and fsdp2-fp8",
    )
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradients (0: no clipping)")
    parser.add_argument(
        "--compile",
        choices=COMPILED,
        default=COMPILED[0],
        help="what torch.compile compiles, with its defaults, in every system: each block, or the whole model",
    )
    parser.add_argument(
        "--kernels",
        choices=KERNELS,
        default=KERNELS[0],
        help="of norms, rotary embeddings, MLPs and the loss of a Llama, in every system",
    )
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="per run of a system")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results, anew after each run")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="write a bar chart, .svg or .png")
    args = parser.parse_args(arguments)
    if min(args.batch_size, args.chunk_numel, args.steps, args.seq_len or 1, *args.ranks) < 1 or args.warmup < 0:
        parser.error(
            "--batch-size, --chunk-numel, --ranks, --steps and --seq-len must be at least 1, --warmup at least 0"
        )
    try:
        limits = gpu_limits(args.device_memory, args.system)
    except ValueError as error:
        parser.error(str(error))
    args.jobs = [
        Job(
            system=system,
            model=args.model,
            ranks=ranks,
            length=args.seq_len or SHAPES[args.model].length,
            batch=args.batch_size,
            clipping=args.clip,
            speculation=args.speculation,
            chunk_numel=args.chunk_numel,
            recomputed=args.fsdp2_recompute,
            fp8=args.fp8,
            gpu_bytes=limits[system],
            host_bytes=args.host_memory,
            warmup=args.warmup,
            steps=args.steps,
            compiled=args.compile,
            kernels=args.kernels,
            states=args.states,
            master=args.master,
        )  # fmt: skip
        for ranks in sorted(set(args.ranks))
        for system in dict.fromkeys(args.system)
    ]
    return args


def gpu_limits(values: list[str], systems: list[str]) -> dict[str, int | None]:
    """Device bytes of each system (None: the whole GPU) from ``SIZE`` and ``SYSTEM=SIZE`` arguments.

    A system's own argument wins.

    Raises:
        ValueError: a size or a system is wrong.
    """
    common: int | None = None
    own: dict[str, int | None] = {}
    for value in values:
        system, separator, size = value.rpartition("=")
        num_bytes = None if size == _WHOLE_GPU else _size(value, size)
        if not separator:
            common = num_bytes
        elif system in systems:
            own[system] = num_bytes
        else:
            raise ValueError(
                f"--device-memory {value}: {system!r} is not among the systems that run: {', '.join(systems)}"
            )
    return {system: own.get(system, common) for system in systems}


def _size(value: str, size: str) -> int:
    try:
        return parse_size_with_unit(size)
    except ValueError as error:
        raise ValueError(f"--device-memory {value}: {error}") from None


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if a system trained."""
    args = parse_arguments(arguments)
    comparison = Comparison(command_line("benchmark.compare"))
    for job in args.jobs:
        run = run_system(job, timeout_seconds=args.timeout, log=show)
        comparison.runs.append(run)
        if run.reason:
            show(f"{job.system}: {run.outcome.value}: {run.reason}\n{run.log_tail}")
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(comparison.to_dict(), indent=2) + "\n", encoding="utf-8")
    print(format_table(comparison))
    if args.plot is not None:
        plot(comparison.to_dict(), "", args.plot)
    return 0 if any(run.is_measured for run in comparison.runs) else 1


if __name__ == "__main__":
    sys.exit(main())

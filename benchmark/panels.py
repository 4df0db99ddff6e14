"""A tensor-parallel model with most of its chunks on the host, against the same with everything on the GPUs.

Whole training steps of a GPT or Llama over a mesh (``tensor_parallel``), by the same code on the same batches. The
first run has the whole GPUs, with room for values and states; the second ``--device-memory`` of each. In the second
run panels of weights come from chunks on the host, gradients go there, and states are updated there. Each run is in
fresh processes.

All of a 30 B model must fit two GPUs for this. So accesses have 8 bits and updates are made in backward: 6.03 bytes per
parameter, 86 GiB on each of two H200s. ``--states`` and ``--speculation`` choose otherwise.

* step: median of the timed steps on rank 0, each from the batch on the host to an idle GPU; all ranks begin together.
* TFLOPS: 6 per parameter and token, and attention, without recomputation; per GPU.
* of resident: the resident step over this step. Losses of both must be the same bits, or OTHER LOSSES is printed.
* exposed: the step less rank 0's seconds of computing in one more step, which is profiled. coll.: the part of that step
  in which only NCCL's kernels ran. up, down: bytes between host and GPU of that step, or of the plan without a GPU.
* states there: chunks whose states are on the GPU, of all.

Without a GPU ranks use gloo, which is for tests: it says nothing about speed.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmark.common import SHAPES, command_line, model_flops, show, table
from benchmark.systems import Job
from benchmark.systems.run import Run, run_system
from patrickstar.command.flags import memory_size
from patrickstar.config import Speculation, States
from patrickstar.sizes import show_size

GOAL = 0.85


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, default="31b")
    parser.add_argument("--rows", type=int, default=1, help="of the mesh")
    parser.add_argument("--columns", type=int, default=2, help="of the mesh; rows times columns GPUs are used")
    parser.add_argument("--batch-size", type=int, default=24, help="sequences per step, of all ranks together")
    parser.add_argument("--seq-len", type=int, help="tokens per sequence (default: the model's)")
    parser.add_argument(
        "--device-memory", type=memory_size, default=40 * 2**30, metavar="SIZE", help="of each GPU, such as 40GiB"
    )
    parser.add_argument("--host-memory", type=memory_size, metavar="SIZE", help="of all ranks together (default: own)")
    parser.add_argument("--states", choices=[member.value for member in States], default=States.EIGHT_BIT.value)
    parser.add_argument(
        "--speculation", choices=[member.value for member in Speculation], default=Speculation.COMMIT.value
    )
    parser.add_argument("--chunk-numel", type=int, default=64 * 2**20, help="elements per chunk")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--timeout", type=float, default=150.0, metavar="SECONDS", help="of each of both runs")


def run(args: argparse.Namespace) -> dict[str, Any]:
    runs = {
        name: run_system(_job(args, limit), timeout_seconds=args.timeout, log=show)
        for name, limit in (("resident", None), ("host chunks", args.device_memory))
    }
    rows = [_row(name, one) for name, one in runs.items()]
    resident, panels = (row.get("step_seconds") for row in rows)
    measured = [one for one in runs.values() if one.is_measured]
    return {
        "case": "panels",
        "model": args.model,
        "mesh": f"{args.rows} x {args.columns}",
        "length": next(iter(runs.values())).job.length,
        "num_parameters": SHAPES[args.model].num_parameters(),
        **{name: getattr(args, name) for name in ("batch_size", "states", "speculation", "chunk_numel")},
        "rows": rows,
        "of_resident": resident / panels if resident and panels else None,
        "same_losses": len({tuple(one.losses) for one in measured}) == 1,
        **(measured[0].provenance if measured else {}),
        "command": command_line("benchmark.run"),
    }


def _job(args: argparse.Namespace, device_memory: int | None) -> Job:
    return Job(
        system="patrickstar", model=args.model, ranks=args.rows * args.columns, rows=args.rows, columns=args.columns,
        length=args.seq_len or SHAPES[args.model].length, batch=args.batch_size, clipping=0.0,
        speculation=args.speculation, states=args.states, chunk_numel=args.chunk_numel, gpu_bytes=device_memory,
        host_bytes=args.host_memory, warmup=args.warmup, steps=args.steps,
    )  # fmt: skip


def _row(name: str, run: Run) -> dict[str, Any]:
    job, report = run.job, run.report
    row = {
        "name": name, "device_memory": job.gpu_bytes, "init_seconds": run.init_seconds,
        "all_step_seconds": run.step_seconds, "losses": run.losses,
    }  # fmt: skip
    if not run.is_measured:
        return {**row, "reason": f"{run.outcome.value}: {run.reason}", "log_tail": run.log_tail}
    timed, activity = run.step_seconds[job.warmup :], run.activity
    step = statistics.median(timed)
    return {
        **row, "reason": "", "step_seconds": step, "timed_step_seconds": timed,
        "tflops_per_gpu": model_flops(job.shape, job.batch) / job.ranks_per_batch / step / 1e12,
        "tokens_per_second": job.batch * job.length / step, "device_peak_bytes": run.device_peak_bytes,
        "host_peak_bytes": run.host_peak_bytes,
        "exposed_seconds": None if activity is None else max(0.0, step - activity["computing_seconds"]),
        "collectives_only_seconds": None if activity is None else activity["collectives_only_seconds"],
        "uploaded_bytes": (activity or {}).get("uploaded_bytes", report["planned_uploaded_bytes"]),
        "downloaded_bytes": (activity or {}).get("downloaded_bytes", report["planned_downloaded_bytes"]),
        "num_device_state_chunks": report["num_device_state_chunks"], "num_chunks": report["num_chunks"],
        "activity": activity, "activity_missing_because": run.activity_reason, "report": report,
    }  # fmt: skip


_COLUMNS = (
    ("", -13, ""), ("step s", 9, ".3f"), ("least", 9, ".3f"), ("most", 9, ".3f"), ("TFLOPS", 8, ".1f"),
    ("exposed s", 11, ".3f"), ("coll. s", 9, ".3f"), ("up", 11, ""), ("down", 11, ""), ("device", 11, ""),
    ("host", 11, ""), ("states there", 14, ""), ("init s", 8, ".1f"),
)  # fmt: skip


def format_table(result: dict[str, Any]) -> str:
    titles, *_ = table(_COLUMNS, [])
    lines = [
        f"{result['model']}: {result['num_parameters'] / 1e9:.3g} B parameters over {result['mesh']}, "
        f"{result['batch_size']} x {result['length']} tokens, states {result['states']}, speculation "
        f"{result['speculation']}, GPU {result.get('gpu', 'not known')}",
        titles,
        *(_line(row) for row in result["rows"]),
    ]
    if result["of_resident"] is not None:
        losses = "the same losses" if result["same_losses"] else "OTHER LOSSES"
        lines.append(f"of resident: {result['of_resident']:.3f} (goal {GOAL}), {losses}")
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    if row["reason"]:
        return f"{row['name']:<13} failed: {row['reason']}; steps {row['all_step_seconds']}"
    timed = row["timed_step_seconds"]
    sizes = ("uploaded_bytes", "downloaded_bytes", "device_peak_bytes", "host_peak_bytes")
    cells = [
        row["name"], row["step_seconds"], min(timed), max(timed), row["tflops_per_gpu"], row["exposed_seconds"],
        row["collectives_only_seconds"], *(row[key] and show_size(row[key]) for key in sizes),
        f"{row['num_device_state_chunks']} of {row['num_chunks']}", row["init_seconds"],
    ]  # fmt: skip
    return table(_COLUMNS, [cells])[1]

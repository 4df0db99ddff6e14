"""Step time and moved bytes against the device budget, from all of the memory down to a tenth, with Belady's bound.

The bound follows from the observed accesses and activation memory alone, by a sweep that is not the planner's. Compute
copies stay as long as copies with a nearer next use leave room (Belady 1966). Gradients go down once, and copies come
up at least once.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmark.common import GptShape, provenance, table, token_batch
from patrickstar import _C, MemoryBudgetError
from patrickstar.runtime import initialize_engine

GOAL = 1.01
PARAM = _C.ArrayKind.PARAM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=8, help="tokens per sequence")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="measured steps per budget")
    parser.add_argument("--chunk-numel", type=int, default=2 * 2**20, help="elements per chunk")
    parser.add_argument(
        "--fractions", type=float, nargs="+", default=[1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    )


def belady_bytes(timeline: list[dict], sizes: dict[tuple, int], room_of: list[int]) -> int:
    """Least bytes over the link for one step, both directions, with nothing resident at its start.

    ``timeline`` has the step's accesses in order, ``sizes`` the bytes of each array, ``room_of`` the bytes available to
    arrays at each entry of ``timeline``.
    """
    finalised = {
        (chunk, kind) for access in timeline for chunk, kind, mode in access["uses"] if mode == _C.ArrayUseMode.FINALISE
    }
    downloads = sum(sizes[array] for array in finalised)
    uses: dict[tuple, list[int]] = {}
    for index, access in enumerate(timeline):
        for chunk, kind, mode in access["uses"]:
            if mode != _C.ArrayUseMode.FINALISE:
                uses.setdefault((chunk, kind), []).append(index)
    resident: set[tuple] = set()
    moved = downloads
    for index, access in enumerate(timeline):
        needed = {(chunk, kind) for chunk, kind, mode in access["uses"] if mode != _C.ArrayUseMode.FINALISE}
        moved += sum(sizes[array] for array in needed - resident if array[1] == PARAM)
        resident |= needed

        def next_use(array, index=index):
            return next((use for use in uses[array] if use > index), 1 << 60)

        resident = {array for array in resident if array in needed or next_use(array) < 1 << 60}
        for array in sorted(resident - needed, key=next_use, reverse=True):
            if sum(sizes[a] for a in resident) <= room_of[index]:
                break
            resident.remove(array)
        resident -= {(chunk, kind) for chunk, kind, mode in access["uses"] if mode == _C.ArrayUseMode.FINALISE}
    return moved


def _measure(shape: GptShape, args: argparse.Namespace, device_memory: int) -> dict:
    config = {
        "steps_per_print": 0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "use_hybrid_adam": False}},
        "bf16": {"enabled": True}, "default_chunk_size": args.chunk_numel, "device_memory": device_memory,
    }  # fmt: skip
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(lambda: shape.build(), 0, config)
    generator = torch.Generator().manual_seed(1)
    with engine:
        engine.train()
        seconds = []
        for index in range(2 + args.steps):
            if index == 2:
                engine.reset_report()
            begin = time.perf_counter()
            optimizer.zero_grad()
            engine.backward(engine(**token_batch(shape, args.batch_size, generator)).loss)
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
        report = engine.report()
        runtime = engine._session.runtime
        timeline = runtime.timeline()
        layout = engine._session.layout
        sizes = {
            (index, kind): layout.chunk(index)["numel"] * 2
            for index in range(layout.num_chunks)
            for kind in (PARAM, _C.ArrayKind.GRAD)
        }
        bound = belady_bytes(timeline, sizes, [device_memory - access["activation_peak_bytes"] for access in timeline])
    return {
        "device_memory_bytes": device_memory, "step_seconds": statistics.median(seconds[2:]),
        "moved_bytes": (report["uploaded_bytes"] + report["downloaded_bytes"]) // args.steps, "belady_bytes": bound,
        "device_peak_bytes": report["device_peak_bytes"],
        "num_on_demand_fetches": report["num_on_demand_fetches"] / args.steps,
        "num_prefetch_hits": report["num_prefetch_hits"] / args.steps, "num_chunks": report["num_chunks"],
    }  # fmt: skip


def run(args: argparse.Namespace) -> dict:
    """Measures fractions of the memory of a step whose optimizer states alone rest on the host."""
    shape = GptShape(args.hidden, args.layers, args.hidden // 64, args.vocab, args.seq_len, checkpointing=False)
    full = _measure(shape, args, 64 * shape.num_parameters())["device_peak_bytes"]
    rows = []
    for fraction in args.fractions:
        budget = int(full * fraction)
        try:
            row = _measure(shape, args, budget)
            row["ratio_to_belady"] = row["moved_bytes"] / row["belady_bytes"]
        except MemoryBudgetError as error:
            row = {"device_memory_bytes": budget, "does_not_fit": str(error)}
        rows.append({"budget_fraction": fraction, **row})
    fitting = [row for row in rows if "moved_bytes" in row]
    return {
        "case": "budget",
        "worst_ratio_to_belady": max(row["ratio_to_belady"] for row in fitting),
        "num_parameters": shape.num_parameters(),
        "full_bytes": full,
        "budgets": rows,
        **provenance(),
    }


_COLUMNS = (
    ("budget", 6, ".0%"), ("MiB", 9, ".1f"), ("step s", 9, ".3f"), ("moved MiB", 12, ".1f"), ("bound MiB", 12, ".1f"),
    ("ratio", 8, ".3f"), ("peak MiB", 11, ".1f"), ("on demand", 12, ".0f"), ("prefetched per step", 22, ".0f"),
    ("", -90, ""),
)  # fmt: skip


def _cells(row: dict) -> list:
    def mib(key: str) -> float | None:
        return row[key] / 2**20 if key in row else None

    return [
        row["budget_fraction"], mib("device_memory_bytes"), row.get("step_seconds"), mib("moved_bytes"),
        mib("belady_bytes"), row.get("ratio_to_belady"), mib("device_peak_bytes"), row.get("num_on_demand_fetches"),
        row.get("num_prefetch_hits"), f"  does not fit: {row['does_not_fit'][:90]}" if "does_not_fit" in row else "",
    ]  # fmt: skip


def format_table(result: dict) -> str:
    lines = [
        f"GPT of {result['num_parameters'] / 1e6:.1f} M parameters, bf16, all optimizer states on the host; 100 % = "
        f"{result['full_bytes'] / 2**20:.0f} MiB",
        *table(_COLUMNS, (_cells(row) for row in result["budgets"])),
    ]
    lines.append(f"worst ratio to Belady's bound {result['worst_ratio_to_belady']:.4f} (goal at most {GOAL})")
    return "\n".join(lines)

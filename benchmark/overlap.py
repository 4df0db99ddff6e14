"""A quarter of the device memory behind a simulated link, against all of it: transfers that compute can hide.

On the CPU backend, in real time: ``delays.link_gbps`` and ``delays.link_latency_us``. The link allows hiding when one
direction's bytes of a step take less time than its compute. The third case, a link too slow for that, shows that the
delays are real. Rounds alternate, so that drift of the machine affects all cases.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmark.common import GptShape, provenance, table, token_batch
from patrickstar.runtime import initialize_engine

GOAL = 1.10
WARMUP = 5  # steps, after which the planner has chosen a plan by measured times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--chunk-numel", type=int, default=2**20, help="elements per chunk")
    parser.add_argument("--fraction", type=float, default=0.25, help="of the device memory of the unlimited run")
    parser.add_argument("--link-gbps", type=float, default=2.0)
    parser.add_argument("--link-latency-us", type=float, default=20.0)
    parser.add_argument("--slow-link-gbps", type=float, default=0.1, help="of the case whose link does not allow it")
    parser.add_argument("--steps", type=int, default=4, help="timed steps per round")
    parser.add_argument("--rounds", type=int, default=3)


def _measure(args: argparse.Namespace, device_memory: int | None, link_gbps: float) -> dict:
    shape = GptShape(args.hidden, args.layers, 8, args.vocab, args.seq_len, checkpointing=True)
    config = {
        "steps_per_print": 0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}, "speculation": "always"},
        "bf16": {"enabled": True}, "default_chunk_size": args.chunk_numel, "device_memory": device_memory,
        "delays": {"link_gbps": link_gbps, "link_latency_us": args.link_latency_us},
    }  # fmt: skip
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(lambda: shape.build(), 0, config)
    generator = torch.Generator().manual_seed(1)
    seconds, losses = [], []
    with engine:
        engine.train()
        for index in range(WARMUP + args.steps):
            if index == WARMUP:
                engine.reset_report()
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss = engine(**token_batch(shape, args.batch_size, generator)).loss
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
        report = engine.report()
    return {"seconds": seconds[WARMUP:], "losses": losses, "report": report}


def run(args: argparse.Namespace) -> dict:
    """Runs the cases in turn, ``rounds`` times."""
    peak = _measure(args, None, args.link_gbps)["report"]["device_peak_bytes"]
    budget = int(peak * args.fraction)
    cases = {
        "unlimited": (None, args.link_gbps),
        "fraction": (budget, args.link_gbps),
        "fraction, slow link": (budget, args.slow_link_gbps),
    }
    measured: dict[str, list[dict]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, (device_memory, link_gbps) in cases.items():
            measured[name].append(_measure(args, device_memory, link_gbps))
    rows = []
    for name, (_, link_gbps) in cases.items():
        report = measured[name][-1]["report"]
        slower_way = max(report["uploaded_bytes"], report["downloaded_bytes"]) / args.steps
        rows.append(
            {
                "case": name,
                "link_gbps": link_gbps,
                "step_seconds": statistics.median(s for run in measured[name] for s in run["seconds"]),
                "device_peak_bytes": report["device_peak_bytes"],
                "uploaded_bytes_per_step": report["uploaded_bytes"] // args.steps,
                "downloaded_bytes_per_step": report["downloaded_bytes"] // args.steps,
                "link_seconds_per_step": slower_way / (link_gbps * 1e9),
                "num_device_state_chunks": report["num_device_state_chunks"],
                "num_chunks": report["num_chunks"],
            }
        )
    for row in rows:
        row["ratio"] = row["step_seconds"] / rows[0]["step_seconds"]
    losses = {tuple(run["losses"]) for runs in measured.values() for run in runs}
    return {
        "case": "overlap", "device_budget_bytes": budget, "rows": rows, "same_losses": len(losses) == 1, "goal": GOAL,
        **provenance(),
    }  # fmt: skip


_COLUMNS = (
    ("case", -22, ""), ("link GB/s", 10, ".2f"), ("step s", 9, ".3f"), ("ratio", 8, ".3f"), ("peak MiB", 10, ".0f"),
    ("up MiB", 8, ".0f"), ("down MiB", 10, ".0f"), ("link s", 8, ".3f"), ("  states on the device", -24, ""),
)  # fmt: skip


def format_table(result: dict) -> str:
    mib = 2**20
    losses = "equal" if result["same_losses"] else "DIFFER"
    cells = (
        [
            row["case"], row["link_gbps"], row["step_seconds"], row["ratio"], row["device_peak_bytes"] / mib,
            row["uploaded_bytes_per_step"] / mib, row["downloaded_bytes_per_step"] / mib, row["link_seconds_per_step"],
            f"  {row['num_device_state_chunks']} of {row['num_chunks']} chunks",
        ]
        for row in result["rows"]
    )  # fmt: skip
    lines = [f"budget {result['device_budget_bytes'] / mib:.0f} MiB, losses {losses}", *table(_COLUMNS, cells)]
    lines.append(f"goal: at most {result['goal']:.2f} x the unlimited step where the link allows it")
    return "\n".join(lines)

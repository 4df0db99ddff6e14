"""Advice of ``patrickstar plan`` for common models, GPUs and hosts, and the plan with each advice followed."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from typing import Any

from patrickstar.plan import main as plan

CASES = (  # model, GPU, host memory, further flags
    ("llama-3.2-1b", "rtx3090", "32GiB", "--batch-size 4 --seq-len 2048 --checkpointing"),
    ("llama-3.2-3b", "rtx4090", "64GiB", "--batch-size 4 --seq-len 2048 --checkpointing"),
    ("llama-3.1-8b", "rtx4090", "128GiB", "--batch-size 4 --seq-len 2048"),
    ("llama-3.1-8b", "a100", "256GiB", "--batch-size 4 --seq-len 4096 --checkpointing --clip 1"),
    ("llama-3.1-8b", "h200", "128GiB", "--batch-size 4 --seq-len 4096 --checkpointing --device-memory 40GiB"),
    ("llama-3.1-8b", "h200", "512GiB", "--batch-size 4 --seq-len 4096 --checkpointing --device-memory 40GiB"),
    ("qwen2.5-14b", "h200", "102GiB", "--batch-size 4 --seq-len 4096 --checkpointing --clip 1"),
    ("qwen2.5-14b", "l40s", "256GiB", "--batch-size 2 --seq-len 2048 --checkpointing"),
    ("qwen2.5-32b", "h100", "582GiB", "--batch-size 2 --seq-len 4096 --checkpointing --gradient-accumulation 4"),
    ("gemma-2-9b", "a10", "192GiB", "--batch-size 1 --seq-len 2048 --checkpointing"),
    ("gpt2-xl", "v100", "64GiB", "--precision fp16 --batch-size 8 --seq-len 1024"),
    ("mistral-7b", "rtx5090", "64GiB", "--batch-size 4 --seq-len 2048 --checkpointing --lora-rank 16"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=len(CASES), metavar="N", help="only the first of them")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plans each case, then plans again with the printed flags of its best advice."""
    return {"cases": [_case(*case) for case in CASES[: args.cases]]}


def _case(model: str, gpu: str, host: str, flags: str) -> dict[str, Any]:
    words = ["--model", model, "--gpu", gpu, "--host-memory", host, *flags.split()]
    asked = _plan(words)
    row: dict[str, Any] = {"model": model, "gpu": gpu, "host_memory": host, "flags": flags, "fits": asked["fits"]}
    row |= {"step_seconds": asked.get("step_seconds"), "tokens_per_second": asked.get("tokens_per_second")}
    row["advice"] = []
    for advice in asked["advice"][:1]:
        followed = _plan([*words, *advice["flags"], "--no-advice"])
        row["advice"].append(advice | {"followed_step_seconds": followed["step_seconds"]})
    return row


def _plan(words: list[str]) -> dict[str, Any]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        plan([*words, "--json"])
    return json.loads(printed.getvalue())


def format_table(result: dict[str, Any]) -> str:
    lines = []
    for row in result["cases"]:
        now = (
            f"{row['step_seconds']:.3f} s, {row['tokens_per_second']:,.0f} tokens/s" if row["fits"] else "does not fit"
        )
        lines.append(f"{row['model']} on {row['gpu']}, {row['host_memory']} of host memory, {row['flags']}: {now}")
        lines += [_advice_line(advice) for advice in row["advice"]] or ["    nothing makes it faster by 1 %"]
    return "\n".join(lines)


def _advice_line(advice: dict[str, Any]) -> str:
    return (
        f"    {advice['text']}: {advice['step_seconds']:.3f} s promised, {advice['followed_step_seconds']:.3f} s when "
        f"followed, {advice['tokens_per_second']:,.0f} tokens/s"
    )

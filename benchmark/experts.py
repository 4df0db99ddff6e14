"""Forward and backward of one mixture of experts: transformers' ``grouped_mm``, and the same products fused.

The shape is Qwen3-30B-A3B's by default. Rows: milliseconds of forward and backward together, and of the forward alone;
peak device memory. The last lines are the fused kernels that take the most time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmark.common import provenance, show
from patrickstar.module.fused_experts import fuse_experts

_WARMUP, _TIMED, _SHOWN = 3, 8, 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--chosen", type=int, default=8, help="experts of a token")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures both twice, in turn. Needs a GPU."""
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = transformers.Qwen3MoeConfig(
        hidden_size=args.hidden, moe_intermediate_size=args.intermediate, num_experts=args.experts,
        num_experts_per_tok=args.chosen,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        block = Qwen3MoeSparseMoeBlock(config).bfloat16()
        x = torch.randn(1, args.tokens, args.hidden, dtype=torch.bfloat16, requires_grad=True)
        direction = torch.ones_like(x)
    for param in block.parameters():
        torch.nn.init.normal_(param, std=0.02)

    def both() -> None:
        torch.autograd.grad(block(x), [x, *block.parameters()], direction)

    def forward() -> None:
        with torch.no_grad():
            block(x)

    rows, kernels = [], []
    for name in ("grouped_mm", "fused") * 2:
        fused = fuse_experts(block) if name == "fused" else None
        torch.cuda.reset_peak_memory_stats()
        row = {"experts": name, "both_ms": _milliseconds(both), "forward_ms": _milliseconds(forward)}
        rows.append(row | {"peak_bytes": torch.cuda.max_memory_allocated()})
        show(_line(rows[-1]))
        if fused is not None:
            kernels = _kernels(both)
            fused.restore()
    return {"case": "experts", **vars(args), "rows": rows, "kernels": kernels, **provenance()}


def _milliseconds(call: Callable[[], None]) -> float:
    for _ in range(_WARMUP):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_TIMED):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / _TIMED


def _kernels(call: Callable[[], None]) -> list[tuple[float, int, str]]:
    """Milliseconds, launches and name of the kernels that take the most time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [(event.self_device_time_total / 1e3, event.count, event.key) for event in events[:_SHOWN]]


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['experts']:10} {row['both_ms']:7.2f} ms, forward {row['forward_ms']:6.2f} ms, "
        f"peak {row['peak_bytes'] / 2**30:.1f} GiB"
    )


def format_table(result: dict[str, Any]) -> str:
    kernels = [f"{ms:8.3f} ms {count:3d} {name[:100]}" for ms, count, name in result["kernels"]]
    return "\n".join([f"{result['gpu']}, {result['tokens']} tokens", *map(_line, result["rows"]), *kernels])

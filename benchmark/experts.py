"""Forward and backward of one mixture of experts: transformers' ``grouped_mm``, the same products fused, and in FP8.

The shape is Qwen3-30B-A3B's by default. Rows: milliseconds of forward and backward together, and of the forward alone;
peak device memory. The last lines are the kernels that take the most time, fused and in FP8.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmark.common import provenance, show
from patrickstar.choices import Fp8Recipe
from patrickstar.fp8.linear import RECIPES
from patrickstar.module import fp8_experts
from patrickstar.module.fused_experts import fuse_experts

_WARMUP, _TIMED, _SHOWN = 3, 8, 16
_KINDS = ("grouped_mm", "fused", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 16384])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--chosen", type=int, default=8, help="experts of a token")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all kinds twice, in turn. Needs a GPU that multiplies groups in FP8.

    Raises:
        SystemExit: the GPU does not.
    """
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    reason = fp8_experts.exclusion_of_experts(torch.device("cuda", torch.cuda.current_device()))
    if reason is not None:
        raise SystemExit(reason)
    fp8_experts.LEAST_ROWS = 1  # an engine computes fewer rows in bfloat16
    config = transformers.Qwen3MoeConfig(
        hidden_size=args.hidden, moe_intermediate_size=args.intermediate, num_experts=args.experts,
        num_experts_per_tok=args.chosen,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        block = Qwen3MoeSparseMoeBlock(config).bfloat16()
    for param in block.parameters():
        torch.nn.init.normal_(param, std=0.02)
    rows, kernels = [], []
    for tokens in args.tokens:
        x = torch.randn(1, tokens, args.hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        calls = _calls(block, x)
        for kind in _KINDS * 2:
            with _changed(block, kind):
                torch.cuda.reset_peak_memory_stats()
                both, forward = map(_milliseconds, calls)
                row = {"experts": kind, "tokens": tokens, "both_ms": both, "forward_ms": forward}
                rows.append(row | {"peak_bytes": torch.cuda.max_memory_allocated()})
                show(_line(rows[-1]))
        for kind in _KINDS[1:]:
            with _changed(block, kind):
                kernels += [(kind, tokens, *kernel) for kernel in device_kernels(calls[0])[:_SHOWN]]
        del x, calls
    return {"case": "experts", **vars(args), "rows": rows, "kernels": kernels, **provenance()}


def _calls(block: nn.Module, x: torch.Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward, and the forward alone."""
    direction = torch.ones_like(x)

    def both() -> None:
        torch.autograd.grad(block(x), [x, *block.parameters()], direction)

    def forward() -> None:
        with torch.no_grad():
            block(x)

    return both, forward


@contextlib.contextmanager
def _changed(block: nn.Module, kind: str) -> Iterator[None]:
    """``block`` with the experts of ``kind``."""
    if kind == "grouped_mm":
        yield
        return
    fused = fuse_experts(block)
    if kind == "fp8":
        block.experts.fp8_recipe = RECIPES[Fp8Recipe.ROWWISE]
    try:
        yield
    finally:
        vars(block.experts).pop("fp8_recipe", None)
        fused.restore()


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


def device_kernels(call: Callable[[], Any]) -> list[tuple[float, int, str]]:
    """Milliseconds, launches and name of kernels, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [(event.self_device_time_total / 1e3, event.count, event.key) for event in events]


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['tokens']:6} tokens, {row['experts']:10} {row['both_ms']:7.2f} ms, forward {row['forward_ms']:6.2f} ms, "
        f"peak {row['peak_bytes'] / 2**30:.1f} GiB"
    )


def format_table(result: dict[str, Any]) -> str:
    kernels = [
        f"{kind:6} {tokens:6} {ms:8.3f} ms {count:3d} {name[:90]}"
        for kind, tokens, ms, count, name in result["kernels"]
    ]
    return "\n".join([result["gpu"], *map(_line, result["rows"]), *kernels])

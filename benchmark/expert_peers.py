"""Forward and backward of one layer's experts: ours, transformers' ``grouped_mm``, and kernels of other packages.

Shapes are of Qwen3-30B-A3B, gpt-oss-20b and Mixtral-8x7B, with SwiGLU and without biases, which all implementations
compute; and gpt-oss-20b with its biases and its gate. All compute the same layer with the same tokens. The router is
not part of it.

* ms: median of forward and backward; TFLOPS of the products.
* of ours: time as a multiple of ours.
* outside: kernels that multiply by no weights (sort, gathers, gate, sums); products: the others.
* peak: GPU memory above the layer's own.
* error: the largest distance by norm of result and gradients from transformers' loop over experts in float32.
* ``products``: the six products alone by ``grouped_mm``.

A package that is missing is named with the reason.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmark import mixtures
from benchmark.common import gib, provenance, show, table
from benchmark.experts import device_kernels
from benchmark.mixtures import Implementation, Layer
from benchmark.mixtures.tuning import tuned
from patrickstar.module.expert_rows import Routing

_ROUNDING = 0.01
"""Largest distance that rounding to bfloat16 explains, between products and in sums of two halves."""
_PRODUCTS = "products"
_COLUMNS = [
    ("shape", -22, ""), ("tokens", 7, ""), ("experts", 12, ""), ("ms", 9, ".2f"), ("TFLOPS", 8, ".0f"),
    ("of ours", 9, ".2f"), ("products", 10, ".2f"), ("outside", 9, ".2f"), ("peak GiB", 10, ".2f"),
    ("error", 9, ".4f"), ("", 3, ""), ("", -60, ""),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    experts: int
    chosen: int
    """Experts of a token."""
    family: str = "qwen3"

    def build(self) -> nn.Module:
        """Experts of transformers, with the names of their family."""
        import transformers
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        common = {"hidden_size": self.hidden, "num_experts_per_tok": self.chosen}
        if self.family == "gpt-oss":
            config = transformers.GptOssConfig(
                intermediate_size=self.intermediate, num_local_experts=self.experts, **common
            )
            block = GptOssMLP
        else:
            config = transformers.Qwen3MoeConfig(
                moe_intermediate_size=self.intermediate, num_experts=self.experts, **common
            )
            block = Qwen3MoeSparseMoeBlock
        config._experts_implementation = "grouped_mm"
        return block(config).experts

    def flops(self, tokens: int) -> float:
        """Floating point operations of the products of forward and backward."""
        return 18.0 * tokens * self.chosen * self.hidden * self.intermediate


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
    "gpt-oss-20b-biases": Shape(2880, 2880, 32, 4, "gpt-oss"),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "tiny": Shape(64, 32, 8, 2),
    "tiny-biases": Shape(64, 32, 8, 2, "gpt-oss"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES)[:4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 65536])
    parser.add_argument("--implementations", nargs="+", choices=mixtures.NAMES, default=list(mixtures.NAMES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tuning", choices=("few", "all"), default="few", help="configurations that Triton tries")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures on the GPU, or on the host without one, whose figures mean nothing."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [mixtures.OURS, *(name for name in args.implementations if name != mixtures.OURS)]
    found = {name: mixtures.find(name) for name in names}
    rows: list[dict[str, Any]] = []
    for shape_name in args.shapes:
        shape = SHAPES[shape_name]
        torch.manual_seed(0)
        with device:
            module = shape.build().bfloat16()
        for param in module.parameters():
            nn.init.normal_(param, std=0.02)
        for tokens in args.tokens:
            layer = _layer(module, shape, tokens)
            start = {"shape": shape_name, "tokens": tokens}
            rows.append(start | {"experts": _PRODUCTS} | _timed(_products(layer), args.repeats))
            own, reference = len(rows), _reference(layer)
            for name, implementation in found.items():
                rows.append(start | {"experts": name} | _row(implementation, layer, reference, args))
                ours = rows[own].get("ms")
                rows[-1]["of_ours"] = rows[-1]["ms"] / ours if ours and "ms" in rows[-1] else None
                rows[-1]["tflops"] = shape.flops(tokens) / rows[-1]["ms"] / 1e9 if "ms" in rows[-1] else None
                show(table(_COLUMNS, [_cells(rows[-1])])[1])
            del layer, reference
    return {"case": "expert_peers", **vars(args), "rows": rows, **provenance()}


def _layer(module: nn.Module, shape: Shape, tokens: int) -> Layer:
    device, dtype = module.down_proj.device, module.down_proj.dtype
    scores = torch.rand(tokens, shape.experts, device=device)
    weights, chosen = scores.topk(shape.chosen)
    hidden = torch.randn(tokens, shape.hidden, device=device, dtype=dtype)
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)
    return Layer(module, hidden.requires_grad_(), chosen, weights.requires_grad_())


def _direction(layer: Layer) -> torch.Tensor:
    """Gradient of the result."""
    generator = torch.Generator(layer.hidden.device).manual_seed(1)
    return torch.randn(layer.hidden.shape, generator=generator, device=layer.hidden.device).to(layer.hidden)


def _both(layer: Layer, forward: Callable[[Layer], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The result and all gradients."""
    leaves = layer.leaves()
    out = forward(layer)
    grads = torch.autograd.grad(out, list(leaves.values()), _direction(layer))
    return {"result": out.detach(), **dict(zip(leaves, grads, strict=True))}


def _reference(layer: Layer) -> dict[str, torch.Tensor]:
    """By transformers' loop over experts, in float32."""
    module = copy.deepcopy(layer.module).float()
    module.config._experts_implementation = "eager"
    hidden, weights = (value.detach().float().requires_grad_() for value in (layer.hidden, layer.weights))
    return _both(Layer(module, hidden, layer.chosen, weights), lambda layer: layer.module(*layer.given))


def _products(layer: Layer) -> Callable[[], Any]:
    """The six products, of rows that lie by expert."""
    from transformers.integrations import moe

    module, num_rows = layer.module, layer.chosen.numel()
    offsets = Routing.of(layer.chosen, module.num_experts).offsets
    given = [(module.gate_up_proj, layer.hidden.size(1)), (module.down_proj, _width(module))]
    pairs = [
        (torch.randn(num_rows, width, device=weight.device, dtype=weight.dtype).requires_grad_(), weight)
        for weight, width in given
    ]

    def call() -> Any:
        found = [
            moe._grouped_linear(rows, weight, offs=offsets, is_transposed=module.is_transposed)
            for rows, weight in pairs
        ]
        directions = [torch.ones_like(value) for value in found]
        return torch.autograd.grad(found, [value for pair in pairs for value in pair], directions)

    return call


def _width(module: nn.Module) -> int:
    """Columns of the rows of the second product."""
    return module.down_proj.size(1 if module.is_transposed else 2)


def _row(
    implementation: Implementation | str, layer: Layer, reference: dict[str, torch.Tensor], args: argparse.Namespace
) -> dict[str, Any]:
    if isinstance(implementation, str):
        return {"reason": implementation}
    if layer.module.has_bias and implementation.excluded:
        return {"reason": implementation.excluded}
    most = implementation.most_elements
    widest = max(2 * _width(layer.module), layer.hidden.size(1))
    if most is not None and layer.chosen.numel() * widest > most:
        return {"reason": f"its indices count {most} elements"}
    try:
        with tuned(mixtures.any_configuration if args.tuning == "all" else implementation.preferred):
            found = _both(layer, implementation.forward)
        errors = {name: _distance(found[name], value) for name, value in reference.items()}
        del found
        row = _timed(lambda: _both(layer, implementation.forward), args.repeats) | {"errors": errors}
        return row | _shares(lambda: _both(layer, implementation.forward), implementation.products)
    except Exception as error:  # of any package's kernels
        return {"reason": f"{type(error).__name__}: {str(error).strip()[:300]}"}


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).nan_to_num(nan=float("inf")).item()


def _timed(call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Median milliseconds of ``call``, and its peak of memory above what there was (0 without a GPU)."""
    call()
    if not torch.cuda.is_available():
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
        return {"ms": statistics.median(times), "peak_bytes": 0}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in pairs]
    return {"ms": statistics.median(times), "peak_bytes": torch.cuda.max_memory_allocated() - before}


def _shares(call: Callable[[], Any], products: tuple[str, ...]) -> dict[str, Any]:
    """Milliseconds of kernels that multiply and of the others, and the longest; nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    kernels = device_kernels(call)
    multiply = [any(part in name for part in products) for *_, name in kernels]
    inside = sum(ms for (ms, *_), does in zip(kernels, multiply, strict=True) if does)
    outside = sum(ms for (ms, *_), does in zip(kernels, multiply, strict=True) if not does)
    return {"products_ms": inside, "outside_ms": outside, "kernels": kernels[:8]}


def _cells(row: dict[str, Any]) -> list[Any]:
    error = max(row["errors"].values()) if "errors" in row else None
    note = row.get("reason")
    if error is not None and not error <= _ROUNDING:
        note = "more than rounding: " + ", ".join(
            f"{name} {value:.2g}" for name, value in row["errors"].items() if not value <= _ROUNDING
        )
    keys = ("shape", "tokens", "experts", "ms", "tflops", "of_ours", "products_ms", "outside_ms")
    return [*map(row.get, keys), gib(row.get("peak_bytes")), error, None, note]


def format_table(result: dict[str, Any]) -> str:
    kernels = []
    for row in result["rows"]:
        if row["tokens"] == max(result["tokens"]):
            kernels += [
                f"{row['shape']} {row['experts']} {ms:8.3f} ms {count:3d} {name[:80]}"
                for ms, count, name in row.get("kernels", ())
            ]
    return "\n".join([result["gpu"], *table(_COLUMNS, map(_cells, result["rows"])), *kernels])

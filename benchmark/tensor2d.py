"""Tensor-parallel blocks of a GPT: in two dimensions, in one, and by PyTorch's DTensor.

Forward and backward of the same blocks on the same tokens, without embedding, head and optimizer, which take as long in
all systems:

* ``patrickstar.tensor2d`` on p x 1, 1 x p and square meshes, and in its one dimension;
* ``parallelize_module`` with ``ColwiseParallel``, ``RowwiseParallel`` and ``SequenceParallel``, as it is, and compiled
  by ``torch.compile``, on GPUs with asynchronous tensor parallelism (``_micro_pipeline_tp``).

All have the same attention kernels (SDPA), one layer for queries, keys and values, and the dtype of ``--dtype``.

Systems take turns, ``--rounds`` times, each in fresh processes; a failed system is reported with the reason, and the
others go on.

* ms: median of all rounds' iterations on the slowest rank, by CUDA events, the host running ahead.
* TFLOPS: of matrix products, three times forward's, and of the causal half of attention, per GPU.
* exposed: the median less rank 0's seconds of computing in one more iteration, which is profiled. collectives: the part
  of that iteration in which only collectives ran. Neither is known on the CPU.
* kernels: the longest of that iteration by name, for the fastest system and for PatrickStar's fastest.
* of best: the fastest system's time over this time. peak: of the GPU's memory, parameters and gradients included.
* gap: the largest relative difference of the norms of output and gradients to those of the first system that ran.

Without a GPU ranks use gloo, which is for tests: it says nothing about speed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmark import passes
from benchmark.common import gib, table
from benchmark.passes import Job, Opener, Passes
from patrickstar.ranks.mesh import Mesh
from patrickstar.tensor2d import MLP2D, Attention2D, LayerNorm2D, MeshGroup, divide_activation, load_whole
from patrickstar.tensor2d.lines import TorchLine, open_group
from patrickstar.tensor2d.one_dimension import MLP1D, Attention1D, tall_group

_GELU = functools.partial(nn.functional.gelu, approximate="tanh")
_WIDEST_GAP = 0.02


@dataclasses.dataclass(frozen=True)
class _Sharded:
    """Blocks of one system on this rank."""

    model: nn.Module
    mesh: str
    share: Callable[[torch.Tensor], torch.Tensor]
    """From activations [b, s, h] to this rank's part."""


_Build = Callable[[Job, torch.device], _Sharded]


class Attention(nn.Module):
    """PyTorch's layers. The first layer's output has queries, keys and values of a head together, so that ranks which
    shard the output have whole heads.
    """

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.head_dim = hidden // heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(hidden).unflatten(-1, (-1, 3, self.head_dim)).permute(3, 0, 2, 1, 4)
        out = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(_GELU(self.up(hidden)))


class Block(nn.Module):
    def __init__(self, norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


def _whole_block(job: Job, index: int, device: torch.device) -> Block:
    """PyTorch's block; the same values in all systems and on all ranks."""
    torch.manual_seed(index)
    hidden = job.options["hidden"]
    with device:
        norms = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        block = Block(norms, Attention(hidden, job.options["heads"]), MLP(hidden))
    return block.to(getattr(torch, job.dtype))


def _values(block: Block, heads: int) -> dict[str, torch.Tensor]:
    """By the names of PatrickStar's layers, whose output has all queries, then all keys, then all values."""
    values = dict(block.named_parameters())
    for name in ("weight", "bias"):
        by_head = values.pop(f"attention.qkv.{name}").detach()
        values[f"attention.attend.qkv.{name}"] = by_head.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return values


def _ours(job: Job, device: torch.device, group: MeshGroup, attention: type, mlp: type) -> nn.Module:
    made = []
    hidden, heads = job.options["hidden"], job.options["heads"]
    for index in range(job.options["layers"]):
        options = {"dtype": getattr(torch, job.dtype), "device": device}
        norms = tuple(LayerNorm2D(hidden, group, **options) for _ in range(2))
        block = Block(
            norms,  # type: ignore[arg-type]
            attention(hidden, heads, group, **options),
            mlp(hidden, 4 * hidden, group, activation=_GELU, **options),
        )
        load_whole(block, _values(_whole_block(job, index, device), heads))
        made.append(block)
    return nn.Sequential(*made)


def _two(rows_of: Callable[[int], int]) -> _Build:
    def opened(job: Job, device: torch.device) -> _Sharded:
        rows = rows_of(job.ranks)
        mesh = Mesh(rows=rows, columns=job.ranks // rows)
        group = MeshGroup.of_torch(mesh)
        model = _ours(job, device, group, Attention2D, MLP2D)
        return _Sharded(model, f"{rows} x {job.ranks // rows}", lambda whole: divide_activation(whole, group.place))

    return opened


def _shard(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def _one(job: Job, device: torch.device) -> _Sharded:
    group = tall_group(TorchLine(open_group()))
    return _Sharded(_ours(job, device, group, Attention1D, MLP1D), "1D", _shard)


def _dtensor(*, compiled: bool) -> _Build:
    def opened(job: Job, device: torch.device) -> _Sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        mesh = init_device_mesh(device.type, (job.ranks,))
        if compiled and device.type == "cuda":
            from torch._inductor import config
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            config._micro_pipeline_tp = True
            enable_symm_mem_for_group(mesh.get_group().group_name)
        gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan = {
            "norm1": SequenceParallel(use_local_output=True), "attention": gathered,
            "attention.qkv": ColwiseParallel(), "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "norm2": SequenceParallel(use_local_output=True), "mlp": gathered, "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }  # fmt: skip
        made = []
        for index in range(job.options["layers"]):
            block = parallelize_module(_whole_block(job, index, device), mesh, plan)
            made.append(torch.compile(block) if compiled else block)
        return _Sharded(nn.Sequential(*made), "1D", _shard)

    return opened


def _square_rows(ranks: int) -> int:
    side = math.isqrt(ranks)
    if side * side != ranks:
        raise ValueError(f"{ranks} ranks are no square mesh; leave out the system `square`")
    return side


def _opener(build: _Build) -> Opener:
    kept: list[_Sharded] = []  # the blocks serve all numbers of tokens

    @contextlib.contextmanager
    def opened(job: Job, tokens: int, device: torch.device) -> Iterator[Passes]:
        if not kept:
            kept.append(build(job, device))
        yield _passes(job, kept[0], tokens, device)

    return opened


def _passes(job: Job, sharded: _Sharded, tokens: int, device: torch.device) -> Passes:
    batch, length = tokens // job.options["seq_len"], job.options["seq_len"]
    generator = torch.Generator(device).manual_seed(batch)
    shape = batch, length, job.options["hidden"]
    inputs, grad = (
        sharded.share(torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, job.dtype)))
        for _ in range(2)
    )
    inputs.requires_grad_()

    def forward() -> torch.Tensor:
        for tensor in (inputs, *sharded.model.parameters()):
            tensor.grad = None
        return sharded.model(inputs)

    def results(out: torch.Tensor) -> Iterable[Iterable[torch.Tensor]]:
        out.backward(grad)
        matrices = [part for part in sharded.model.parameters() if part.dim() == 2]  # ranks shard no other parameter
        return [out], [inputs.grad], [getattr(part.grad, "_local_tensor", part.grad) for part in matrices]

    return Passes(forward, lambda out: out.backward(grad), results, {"mesh": sharded.mesh})


SYSTEMS: dict[str, Opener] = {
    "columns": _opener(_two(lambda ranks: 1)), "rows": _opener(_two(lambda ranks: ranks)),
    "square": _opener(_two(_square_rows)), "one-dimension": _opener(_one),
    "dtensor": _opener(_dtensor(compiled=False)), "dtensor-compiled-async": _opener(_dtensor(compiled=True)),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    passes.add_arguments(parser, SYSTEMS, [name for name in SYSTEMS if name != "square"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384, 65536], help="of all sequences together")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each system")


def run(args: argparse.Namespace) -> dict[str, Any]:
    wrong = [tokens for tokens in args.tokens if tokens % args.seq_len]
    if wrong:
        raise ValueError(
            f"--tokens {wrong[0]} are no whole sequences of {args.seq_len}; give --seq-len that divides it"
        )
    rows, failures, settings = passes.run_systems(
        args,
        "tensor2d",
        sizes=args.tokens,
        options={name: getattr(args, name) for name in ("seq_len", "hidden", "heads", "layers")},
        ranks_of=lambda system: args.ranks,
        rounds=args.rounds,
        is_profiled=True,
    )
    for row in rows:
        tokens = row["tokens"] = row["size"]
        flops = args.layers * tokens * (3 * 2 * 12 * args.hidden**2 + 3.5 * 2 * args.seq_len * args.hidden)
        row["tflops_per_rank"] = flops / row["median_seconds"] / args.ranks / 1e12
        best = min(peer["median_seconds"] for peer in rows if peer["size"] == tokens)
        row["of_best"] = best / row["median_seconds"]
    return {
        "case": "tensor2d", "rows": rows, "failures": failures, "ranks": args.ranks, "rounds": args.rounds, **settings,
    }  # fmt: skip


_COLUMNS = (
    ("system", -24, ""), ("mesh", -9, ""), ("tokens", 8, ""), ("ms", 10, ".2f"), ("forward", 10, ".2f"),
    ("least", 10, ".2f"), ("most", 10, ".2f"), ("TFLOPS", 8, ".0f"), ("of best", 9, ".3f"), ("exposed ms", 12, ".2f"),
    ("collectives", 13, ".2f"), ("peak GiB", 10, ".2f"), ("gap", 9, ".1e"), ("", -15, ""),
)  # fmt: skip


def _cells(row: dict[str, Any]) -> list[Any]:
    times = [row["median_seconds"], row["median_forward_seconds"], min(row["seconds"]), max(row["seconds"])]
    profiled = [None if row[key] is None else row[key] * 1e3 for key in ("exposed_seconds", "collectives_only_seconds")]
    return [
        row["system"], row["mesh"], row["tokens"], *(seconds * 1e3 for seconds in times), row["tflops_per_rank"],
        row["of_best"], *profiled, gib(row["peak_bytes"]), row["gap"],
        "  OTHER NUMBERS" if row["gap"] > _WIDEST_GAP else "",
    ]  # fmt: skip


def format_table(result: dict[str, Any]) -> str:
    device = result["gpu"] if result["device_type"] == "cuda" else f"{result['cpu']}, gloo"
    lines = [
        f"{result['layers']} blocks of a GPT, forward and backward: hidden size {result['hidden']}, {result['heads']} "
        f"heads, sequences of {result['seq_len']} tokens, {result['dtype']}, {result['ranks']} ranks, {device}, torch "
        f"{result['torch_version']}",
        *table(_COLUMNS, (_cells(row) for row in sorted(result["rows"], key=lambda row: row["tokens"]))),
    ]
    lines += [f"{failure['system']} failed: {failure['reason']}" for failure in result["failures"]]
    for tokens in sorted({row["tokens"] for row in result["rows"]}):
        lines += _kernels([row for row in result["rows"] if row["tokens"] == tokens])
    return "\n".join(line.rstrip() for line in lines)


def _kernels(rows: list[dict[str, Any]]) -> list[str]:
    """Lines for the fastest system among ``rows``, and for PatrickStar's fastest."""
    by_time = sorted((row for row in rows if row["profile"] is not None), key=lambda row: row["median_seconds"])
    ours = [row for row in by_time if not row["system"].startswith("dtensor")]
    lines = []
    for row in {row["system"]: row for row in (*by_time[:1], *ours[:1])}.values():
        lines.append(f"longest kernels of {row['system']}, {row['tokens']} tokens, on rank 0:")
        lines += [
            f"{kernel['seconds'] * 1e3:>10.2f} ms{kernel['number']:>6} x  {kernel['name']}"
            for kernel in row["profile"]["kernels"]
        ]
    return lines

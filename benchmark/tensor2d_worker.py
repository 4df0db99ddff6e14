"""One rank that times one system's blocks of a GPT (``benchmark.run tensor2d``), with each batch in turn."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmark.pass_times import timed_passes
from benchmark.rank_jobs import add_result, work
from benchmark.systems.gpu_activity import profile_step
from patrickstar.ranks.mesh import Mesh
from patrickstar.tensor2d import MLP2D, Attention2D, LayerNorm2D, MeshGroup, divide_activation, load_whole
from patrickstar.tensor2d.lines import TorchLine, open_group
from patrickstar.tensor2d.one_dimension import MLP1D, Attention1D, tall_group

_GELU = functools.partial(nn.functional.gelu, approximate="tanh")


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures."""

    system: str
    ranks: int
    device_type: str
    batches: list[int]
    length: int
    hidden: int
    heads: int
    layers: int
    dtype: str
    warmup: int
    iterations: int
    results: str
    """As of :class:`~benchmark.rank_jobs.RankJob`."""


@dataclasses.dataclass(frozen=True)
class Divided:
    """Blocks of one system on this rank."""

    model: nn.Module
    mesh: str
    share: Callable[[torch.Tensor], torch.Tensor]
    """This rank's part of activations [b, s, h]."""


class Attention(nn.Module):
    """PyTorch's layers. Of the first one's output each head has its queries, keys and values together, so that ranks
    which divide the output have whole heads.
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
    """PyTorch's layers."""

    def __init__(self, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(_GELU(self.up(hidden)))


class Block(nn.Module):
    """Of whatever layers."""

    def __init__(self, norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


def whole_block(job: Job, index: int, device: torch.device) -> Block:
    """The same numbers for all systems and ranks."""
    torch.manual_seed(index)
    with device:
        norms = nn.LayerNorm(job.hidden), nn.LayerNorm(job.hidden)
        block = Block(norms, Attention(job.hidden, job.heads), MLP(job.hidden))
    return block.to(getattr(torch, job.dtype))


def _values(block: Block, heads: int) -> dict[str, torch.Tensor]:
    """By the names of our layers, whose output has all queries, all keys and all values."""
    values = dict(block.named_parameters())
    for name in ("weight", "bias"):
        by_head = values.pop(f"attention.qkv.{name}").detach()
        values[f"attention.attend.qkv.{name}"] = by_head.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return values


def _ours(job: Job, device: torch.device, group: MeshGroup, attention: type, mlp: type) -> nn.Module:
    made = []
    for index in range(job.layers):
        options = {"dtype": getattr(torch, job.dtype), "device": device}
        norms = tuple(LayerNorm2D(job.hidden, group, **options) for _ in range(2))
        block = Block(
            norms,  # type: ignore[arg-type]
            attention(job.hidden, job.heads, group, **options),
            mlp(job.hidden, 4 * job.hidden, group, activation=_GELU, **options),
        )
        load_whole(block, _values(whole_block(job, index, device), job.heads))
        made.append(block)
    return nn.Sequential(*made)


def _two(rows_of: Callable[[int], int]) -> Callable[[Job, torch.device], Divided]:
    def opened(job: Job, device: torch.device) -> Divided:
        rows = rows_of(job.ranks)
        mesh = Mesh(rows=rows, columns=job.ranks // rows)
        group = MeshGroup.of_torch(mesh)
        model = _ours(job, device, group, Attention2D, MLP2D)
        return Divided(model, f"{rows} x {job.ranks // rows}", lambda whole: divide_activation(whole, group.place))

    return opened


def _shard(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def _one(job: Job, device: torch.device) -> Divided:
    group = tall_group(TorchLine(open_group()))
    return Divided(_ours(job, device, group, Attention1D, MLP1D), "1D", _shard)


def _dtensor(*, compiled: bool) -> Callable[[Job, torch.device], Divided]:
    def opened(job: Job, device: torch.device) -> Divided:
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
            "norm1": SequenceParallel(use_local_output=True),
            "attention": gathered,
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "norm2": SequenceParallel(use_local_output=True),
            "mlp": gathered,
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        made = []
        for index in range(job.layers):
            block = parallelize_module(whole_block(job, index, device), mesh, plan)
            made.append(torch.compile(block) if compiled else block)
        return Divided(nn.Sequential(*made), "1D", _shard)

    return opened


def _square_rows(ranks: int) -> int:
    side = math.isqrt(ranks)
    if side * side != ranks:
        raise ValueError(f"{ranks} ranks are no square mesh; leave out the system `square`")
    return side


SYSTEMS: dict[str, Callable[[Job, torch.device], Divided]] = {
    "columns": _two(lambda ranks: 1),
    "rows": _two(lambda ranks: ranks),
    "square": _two(_square_rows),
    "one-dimension": _one,
    "dtensor": _dtensor(compiled=False),
    "dtensor-compiled-async": _dtensor(compiled=True),
}


@dataclasses.dataclass
class Iteration:
    """Forward and backward on one batch."""

    model: nn.Module
    tokens: torch.Tensor
    grad: torch.Tensor

    def forward(self) -> torch.Tensor:
        for parameter in self.model.parameters():
            parameter.grad = None
        self.tokens.grad = None
        return self.model(self.tokens)

    def backward(self, out: torch.Tensor) -> None:
        out.backward(self.grad)

    def run(self) -> torch.Tensor:
        out = self.forward()
        self.backward(out)
        return out

    def squares(self) -> torch.Tensor:
        """This rank's part of those of output and gradients: of the input, and of matrices, which ranks divide."""
        out = self.run().detach()
        grads = [getattr(part.grad, "_local_tensor", part.grad) for part in self.model.parameters() if part.dim() == 2]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float32) ** 2 for part in (out, self.tokens.grad, *grads)]
        return torch.stack([norms[0], norms[1], torch.stack(norms[2:]).sum()])


def measure(job: Job, divided: Divided, batch: int, device: torch.device) -> dict[str, Any]:
    """Times of each iteration on the slowest rank, the largest peak of memory, rank 0's profile, and norms."""
    is_cuda = device.type == "cuda"
    generator = torch.Generator(device).manual_seed(batch)
    shape = batch, job.length, job.hidden
    tokens, grad = (
        divided.share(torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, job.dtype)))
        for _ in range(2)
    )
    iteration = Iteration(divided.model, tokens.requires_grad_(), grad)
    timed_passes(iteration.forward, iteration.backward, device, job.warmup)
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    times = torch.tensor(
        timed_passes(iteration.forward, iteration.backward, device, job.iterations), dtype=torch.float64, device=device
    )
    peak = torch.tensor(torch.cuda.max_memory_allocated() if is_cuda else 0, device=device)

    def profiled() -> None:
        iteration.run()
        torch.cuda.synchronize()

    profile = profile_step(profiled) if is_cuda else None
    squares = iteration.squares()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    dist.all_reduce(squares)
    forward, both = times.t().tolist()
    return {
        "tokens": batch * job.length,
        "mesh": divided.mesh,
        "forward_seconds": forward,
        "seconds": both,
        "peak_bytes": int(peak) if is_cuda else None,
        "profile": profile,
        "norms": squares.sqrt().tolist(),
    }


def run(job: Job) -> None:
    """All batches, until one fails."""
    rank = int(os.environ["RANK"])
    device = torch.device(job.device_type, rank) if job.device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    divided = SYSTEMS[job.system](job, device)
    for batch in job.batches:
        found = measure(job, divided, batch, device)
        if rank == 0:
            add_result(job, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    work(run, Job)

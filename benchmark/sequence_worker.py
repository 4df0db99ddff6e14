"""One rank that times one system's attention over a divided sequence (``benchmark.run sequence``), of each length in
turn. It is started with the variables of torchrun and the job as JSON; rank 0 writes a JSON line per length.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # PyTorch's context parallelism replaces a function of it
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmark.pass_times import timed_passes
from benchmark.rank_jobs import add_result, work
from patrickstar.sequence import Mode, SequenceGroup, attention, positions_of_rank


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures."""

    system: str
    ranks: int
    device_type: str
    lengths: list[int]
    heads: int
    key_heads: int
    head_dim: int
    dtype: str
    warmup: int
    iterations: int
    results: str
    """As of :class:`~benchmark.rank_jobs.RankJob`."""


@dataclasses.dataclass
class Step:
    """Forward is timed, then the gradients of ``leaves``."""

    forward: Callable[[], torch.Tensor]
    leaves: list[torch.Tensor]
    grad: torch.Tensor
    note: str = ""

    def backward(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradients of ``leaves``."""
        return torch.autograd.grad(out, self.leaves, self.grad)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Causal attention over ``length`` tokens, the same numbers for all systems and ranks."""

    job: Job
    length: int
    device: torch.device

    def tensors(self, here: torch.Tensor | None = None) -> tuple[list[torch.Tensor], torch.Tensor]:
        """q, k, v and the gradient of the output: [1, heads, tokens, head_dim], in memory [1, tokens, heads, head_dim]
        as projections of a model give them, of the tokens ``here``; None: of all.
        """
        generator = torch.Generator(self.device).manual_seed(1)
        job = self.job

        def draw(heads: int) -> torch.Tensor:
            shape = 1, self.length, heads, job.head_dim
            drawn = torch.randn(shape, generator=generator, device=self.device, dtype=getattr(torch, job.dtype))
            return (drawn if here is None else drawn[:, here]).transpose(1, 2)

        *leaves, grad = (draw(heads) for heads in (job.heads, job.key_heads, job.key_heads, job.heads))
        return [leaf.requires_grad_() for leaf in leaves], grad


Opener = Callable[[Problem], contextlib.AbstractContextManager[Step]]


def _sdpa(backend: SDPBackend) -> Opener:
    @contextlib.contextmanager
    def opened(problem: Problem) -> Iterator[Step]:
        leaves, grad = problem.tensors()
        with sdpa_kernel(backend):
            yield Step(lambda: F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True), leaves, grad)

    return opened


def _patrickstar(mode: Mode) -> Opener:
    @contextlib.contextmanager
    def opened(problem: Problem) -> Iterator[Step]:
        group = SequenceGroup()
        here = positions_of_rank(group.rank, group.size, problem.length // group.size, mode).to(problem.device)
        leaves, grad = problem.tensors(here)
        yield Step(lambda: attention(*leaves, group, mode, causal=True), leaves, grad)

    return opened


def _context_parallel(rotation: str, backend: SDPBackend) -> Opener:
    """PyTorch's, with its load balancing, which says itself which tokens a rank has. Its tensors are contiguous, since
    it copies those that are not.
    """

    @contextlib.contextmanager
    def opened(problem: Problem) -> Iterator[Step]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(rotation)
        mesh = init_device_mesh(problem.device.type, (dist.get_world_size(),))
        here = torch.arange(problem.length, device=problem.device)
        with (
            sdpa_kernel(backend),
            context_parallel(mesh, buffers=[here], buffer_seq_dims=[0], no_restore_buffers={here}),
        ):
            leaves, grad = problem.tensors(here)
            leaves = [leaf.detach().contiguous().requires_grad_() for leaf in leaves]
            step = Step(lambda: _grouped(leaves), leaves, grad.contiguous())
            try:
                _gradients(step)
            except Exception:
                traceback.print_exc()
                step = dataclasses.replace(step, forward=lambda: _repeated(leaves), note="key heads repeated")
            yield step

    return opened


def _grouped(leaves: list[torch.Tensor]) -> torch.Tensor:
    return F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)


def _repeated(leaves: list[torch.Tensor]) -> torch.Tensor:
    q, k, v = leaves
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ALONE: dict[str, Opener] = {
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
}
TOGETHER: dict[str, Opener] = {
    "zigzag": _patrickstar(Mode.ZIGZAG),
    "ring": _patrickstar(Mode.RING),
    "ulysses": _patrickstar(Mode.ULYSSES),
    **{
        f"context-parallel-{rotation}-{name}": _context_parallel(rotation, backend)
        for rotation in ("allgather", "alltoall")
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION))
    },
}


def _gradients(step: Step) -> tuple[torch.Tensor, ...]:
    return step.backward(step.forward())


def measure(problem: Problem, opener: Opener) -> dict[str, Any]:
    """Times of each iteration on the slowest rank, the largest peak of memory, and the norms of the results."""
    job, device = problem.job, problem.device
    is_cuda = device.type == "cuda"
    with opener(problem) as step:
        timed_passes(step.forward, step.backward, device, job.warmup)
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if job.ranks > 1:
            dist.barrier()
        times = torch.tensor(
            timed_passes(step.forward, step.backward, device, job.iterations), dtype=torch.float64, device=device
        )
        peak = torch.tensor(torch.cuda.max_memory_allocated() if is_cuda else 0, device=device)
        out = step.forward()
        results = [out.detach(), *step.backward(out)]
        squares = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float32) ** 2 for part in results])
        note = step.note
    if job.ranks > 1:
        dist.all_reduce(times, dist.ReduceOp.MAX)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        dist.all_reduce(squares)
    forward, both = times.t().tolist()
    return {
        "length": problem.length,
        "forward_seconds": forward,
        "seconds": both,
        "peak_bytes": int(peak) if is_cuda else None,
        "norms": squares.sqrt().tolist(),
        "note": note,
    }


def run(job: Job) -> None:
    """All lengths, until one fails."""
    rank = int(os.environ["RANK"])
    device = torch.device(job.device_type, rank) if job.device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if job.ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    opener = (ALONE | TOGETHER)[job.system]
    for length in job.lengths:
        found = measure(Problem(job, length, device), opener)
        if rank == 0:
            add_result(job, found)
    if job.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    work(run, Job)

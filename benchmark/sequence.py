"""Causal attention over a sequence that GPUs share, against one GPU's and PyTorch's context parallelism.

Forward and backward of one layer's attention, the same numbers for all systems:

* PyTorch's own attention on one GPU, with flash attention and with cuDNN's;
* ``patrickstar.sequence.attention`` in the modes zigzag, ring and ulysses;
* ``torch.distributed.tensor.experimental.context_parallel`` with load balancing, by both rotations, over both kernels.

Each system runs in fresh processes; a failed system is reported with the reason, and the others go on.

* ms: median of the iterations' times on the slowest rank, by CUDA events, the host running ahead.
* TFLOPS: 3.5 times those of the causal half of two products of queries, keys and head_dim, per GPU.
* of linear: the best one-GPU time over the number of ranks times this time; 1 is a perfect division of the work.
* gap: the largest relative difference of the norms of output and gradients to those of the first system that ran.

Without a GPU ranks use gloo, and systems that need a GPU fail.
"""

from __future__ import annotations

import argparse
import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # PyTorch's context parallelism replaces a function of it
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmark import passes
from benchmark.common import gib, table
from benchmark.passes import Job, Opener, Passes
from patrickstar.sequence import Mode, SequenceGroup, attention, positions_of_rank

_WIDEST_GAP = 0.01
_Leaves = list[torch.Tensor]


def _tensors(
    job: Job, length: int, device: torch.device, here: torch.Tensor | None = None
) -> tuple[_Leaves, torch.Tensor]:
    """q, k, v and the gradient of the output: [1, heads, tokens, head_dim], the same numbers for all systems and ranks.

    Memory is [1, tokens, heads, head_dim], as a model's projections give it. ``here`` selects tokens; None: all.
    """
    generator = torch.Generator(device).manual_seed(1)
    heads, key_heads, head_dim = (job.options[name] for name in ("heads", "key_heads", "head_dim"))

    def draw(num_heads: int) -> torch.Tensor:
        shape = 1, length, num_heads, head_dim
        drawn = torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, job.dtype))
        return (drawn if here is None else drawn[:, here]).transpose(1, 2)

    *leaves, grad = (draw(number) for number in (heads, key_heads, key_heads, heads))
    return [leaf.requires_grad_() for leaf in leaves], grad


def _passes(forward: Callable[[], torch.Tensor], leaves: _Leaves, grad: torch.Tensor, note: str = "") -> Passes:
    def backward(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad)

    return Passes(forward, backward, lambda out: ([part] for part in (out, *backward(out))), {"note": note})


def _sdpa(backend: SDPBackend) -> Opener:
    @contextlib.contextmanager
    def opened(job: Job, length: int, device: torch.device) -> Iterator[Passes]:
        leaves, grad = _tensors(job, length, device)
        with sdpa_kernel(backend):
            yield _passes(lambda: _grouped(leaves), leaves, grad)

    return opened


def _patrickstar(mode: Mode) -> Opener:
    @contextlib.contextmanager
    def opened(job: Job, length: int, device: torch.device) -> Iterator[Passes]:
        group = SequenceGroup()
        here = positions_of_rank(group.rank, group.size, length // group.size, mode).to(device)
        leaves, grad = _tensors(job, length, device, here)
        yield _passes(lambda: attention(*leaves, group, mode, causal=True), leaves, grad)

    return opened


def _context_parallel(rotation: str, backend: SDPBackend) -> Opener:
    """PyTorch's, with its load balancing, which chooses each rank's tokens. It copies tensors that are not contiguous,
    so its tensors are contiguous.
    """

    @contextlib.contextmanager
    def opened(job: Job, length: int, device: torch.device) -> Iterator[Passes]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(rotation)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        here = torch.arange(length, device=device)
        with (
            sdpa_kernel(backend),
            context_parallel(mesh, buffers=[here], buffer_seq_dims=[0], no_restore_buffers={here}),
        ):
            leaves, grad = _tensors(job, length, device, here)
            leaves, grad = [leaf.detach().contiguous().requires_grad_() for leaf in leaves], grad.contiguous()
            found = _passes(lambda: _grouped(leaves), leaves, grad)
            try:
                found.backward(found.forward())
            except Exception:
                traceback.print_exc()
                found = _passes(lambda: _repeated(leaves), leaves, grad, note="key heads repeated")
            yield found

    return opened


def _grouped(leaves: _Leaves) -> torch.Tensor:
    return F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)


def _repeated(leaves: _Leaves) -> torch.Tensor:
    q, k, v = leaves
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


_ALONE: dict[str, Opener] = {
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
}
SYSTEMS: dict[str, Opener] = {
    **_ALONE,
    "zigzag": _patrickstar(Mode.ZIGZAG),
    "ring": _patrickstar(Mode.RING),
    "ulysses": _patrickstar(Mode.ULYSSES),
    **{
        f"context-parallel-{rotation}-{name}": _context_parallel(rotation, backend)
        for rotation in ("allgather", "alltoall")
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION))
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    passes.add_arguments(parser, SYSTEMS, list(SYSTEMS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[16384, 65536, 131072], help="tokens of the sequence")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)


def run(args: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(args, name) for name in ("heads", "key_heads", "head_dim")}
    rows, failures, settings = passes.run_systems(
        args, "sequence", sizes=args.lengths, options=options,
        ranks_of=lambda system: 1 if system in _ALONE else args.ranks,
    )  # fmt: skip
    for row in rows:
        length = row["length"] = row["size"]
        alone = [peer["median_seconds"] for peer in rows if (peer["size"], peer["ranks"]) == (length, 1)]
        row["of_linear"] = min(alone) / (row["ranks"] * row["median_seconds"]) if alone else None
        flops = 3.5 * 2 * length**2 * args.head_dim * args.heads
        row["tflops_per_rank"] = flops / row["median_seconds"] / row["ranks"] / 1e12
    return {
        "case": "sequence", "rows": rows, "failures": failures, "cudnn_version": torch.backends.cudnn.version(),
        **settings,
    }  # fmt: skip


_COLUMNS = (
    ("system", -34, ""), ("ranks", 6, ""), ("tokens", 9, ""), ("ms", 10, ".2f"), ("forward", 10, ".2f"),
    ("least", 10, ".2f"), ("most", 10, ".2f"), ("TFLOPS", 8, ".0f"), ("of linear", 11, ".3f"), ("peak GiB", 10, ".2f"),
    ("gap", 9, ".1e"), ("", -30, ""),
)  # fmt: skip


def _cells(row: dict[str, Any]) -> list[Any]:
    times = [row["median_seconds"], row["median_forward_seconds"], min(row["seconds"]), max(row["seconds"])]
    notes = [row["note"]] * bool(row["note"]) + ["OTHER NUMBERS"] * (row["gap"] > _WIDEST_GAP)
    return [
        row["system"], row["ranks"], row["length"], *(seconds * 1e3 for seconds in times), row["tflops_per_rank"],
        row["of_linear"], gib(row["peak_bytes"]), row["gap"], "".join(f"  {note}" for note in notes),
    ]  # fmt: skip


def format_table(result: dict[str, Any]) -> str:
    gpu = result["gpu"] if result["device_type"] == "cuda" else result["cpu"]
    rows = sorted(result["rows"], key=lambda row: (row["length"], row["ranks"]))
    lines = [
        f"causal attention, forward and backward: {result['heads']} heads, {result['key_heads']} key heads of "
        f"{result['head_dim']}, {result['dtype']}, {gpu}, torch {result['torch_version']}",
        *table(_COLUMNS, (_cells(row) for row in rows)),
    ]
    lines += [f"{failure['system']} failed: {failure['reason']}" for failure in result["failures"]]
    return "\n".join(lines)

"""CPU Adam: one fused pass against torch's operations for the same work, and against the speed of a copy.

The work: a bfloat16 gradient is unscaled and clipped, AdamW updates the float32 master and its two states, and the new
parameter is rounded to bfloat16. It is timed twice:

- update: the factors of unscaling and clipping are known. PatrickStar: one pass, the parameter overwrites the gradient,
  28 bytes read and written per parameter. torch: cast, unscaling, clipping, AdamW(fused=True), cast, all into existing
  memory: 62 bytes, with the lines that stores of the casts read first. On memory alone the ratio would be 2.2.
- step: with the norm, as in a training loop. PatrickStar: sum of squares of the gradient, then the update. torch: cast,
  unscaling, clip_grad_norm_, AdamW(fused=True), cast.

Passes of a two-phase update, with bytes per parameter:

- param (16): the new parameter alone. states (26): the states, afterwards.
- between (16): before the clipping coefficient is known, the parameters that are the same for all coefficients within
  10 %, at a learning rate of 1e-5. open: the rest, once it is known; the next forward waits for this pass alone.
- put (16), put between (16), behind (24): the same with split masters, whose new parameters overwrite the old.

All arrays, also torch's and the copy's, lie on huge pages (where the system grants them), and the rounds are
interleaved.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import mmap
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmark.common import provenance
from patrickstar import _C

BYTES_PER_PARAM = 28  # master, momentum, variance: 4 read and 4 written each; gradient 2 read; parameter 2 written
_PASSES = {
    "param_pass": 16, "states_pass": 26, "between_pass": 16, "put_pass": 16, "put_between_pass": 16, "behind_pass": 24,
}  # fmt: skip
"""Bytes read and written per parameter."""
FINE_TUNING_LR = 1e-5
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
LOSS_SCALE = 1024.0
MAX_NORM = 4.0  # well below the norm of these gradients, so that clipping has work to do
CLIPPING = 0.5  # the clipping coefficient of the update alone
GOALS = {"speedup_vs_torch": 2.0, "share_of_copy_bandwidth": 0.9}
_MIN_SECONDS_PER_CALL = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--numel", type=int, default=64 * 2**20, help="parameters")
    parser.add_argument("--num-threads", type=int, default=_C.num_available_cpus(), help="default: all, %(default)s")
    parser.add_argument("--repeats", type=int, default=11, help="interleaved rounds")


def huge_zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros at the start of a huge page; the tensor keeps the memory alive."""
    huge = 2 * 2**20
    memory = mmap.mmap(-1, numel * dtype.itemsize + huge)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % huge
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start).fill_(0.0)


def huge_copy(tensor: torch.Tensor) -> torch.Tensor:
    return huge_zeros(tensor.numel(), tensor.dtype).copy_(tensor)


def adam_scalars(step: float, grad_scale: float, lr: float) -> _C.optim.AdamScalars:
    """Scalars of AdamW in step ``step``, from 1; math.inf leaves the bias corrections out."""
    beta1, beta2 = OPTIONS["betas"]
    return _C.optim.AdamScalars(
        grad_scale=grad_scale, weight_decay=0.0, decay=1 - lr * OPTIONS["weight_decay"], beta2=beta2,
        one_minus_beta1=1 - beta1, one_minus_beta2=1 - beta2, eps=OPTIONS["eps"],
        inv_sqrt_bias_correction2=(1 - beta2**step) ** -0.5, step_size=lr / (1 - beta1**step),
    )  # fmt: skip


class OurAdam:
    """The fused pass, which overwrites `grad` with the parameter."""

    def __init__(self, master: torch.Tensor, grad: torch.Tensor, num_threads: int) -> None:
        self.master = huge_copy(master)
        self.momentum, self.variance = (huge_zeros(master.numel(), torch.float32) for _ in range(2))
        self.grad = huge_copy(grad)
        self.new_param = huge_zeros(grad.numel(), grad.dtype)
        self.isa = _C.optim.isa()
        self._partials = torch.zeros(-(-grad.numel() // _C.optim.SQUARES_BLOCK), dtype=torch.float64)
        self._num_threads = num_threads
        self._num_steps = 0
        pieces = -(-grad.numel() // _C.optim.SCALE_DEPENDENT_PIECE)
        self._open = torch.zeros(pieces, _C.optim.OPEN_LOG_BYTES, dtype=torch.uint8)

    def step(self) -> None:
        grad, numel = self.grad.data_ptr(), self.grad.numel()
        _C.optim.sum_squares(self.isa, grad, _C.DType.BFLOAT16, numel, self._partials.data_ptr(), self._num_threads)
        norm = math.sqrt(self._partials.sum().item()) / LOSS_SCALE
        self.update(min(1.0, MAX_NORM / (norm + 1e-6)) / LOSS_SCALE)

    def update(self, grad_scale: float = CLIPPING / LOSS_SCALE) -> None:
        self._num_steps += 1
        self._run(_C.optim.update, self._range(self.grad), self._scalars(grad_scale))

    def param_pass(self) -> None:
        self._num_steps += 1
        self._run(_C.optim.update_param, self._range(self.new_param), self._scalars())

    def states_pass(self) -> None:
        self._run(_C.optim.update, self._range(None), self._scalars())

    def between_pass(self) -> None:
        self._num_steps += 1
        least, most = (factor * CLIPPING / LOSS_SCALE for factor in (0.9, 1.1))
        scalars = self._scalars(least, FINE_TUNING_LR)
        self._run(_C.optim.update_param_between, self._range(self.new_param), scalars, self._open.data_ptr(), most)

    def open_pass(self) -> None:
        scalars = self._scalars(lr=FINE_TUNING_LR)
        self._run(_C.optim.update_param_scale_dependent, self._range(self.new_param), scalars, self._open.data_ptr())

    @property
    def open_share(self) -> float:
        """Share of parameters that the last between_pass left open; a piece without room counts as open."""
        counts = self._open[:, :8].contiguous().view(torch.int64)
        return torch.where(counts < 0, _C.optim.SCALE_DEPENDENT_PIECE, counts).sum().item() / self.master.numel()

    def _range(self, param: torch.Tensor | None) -> _C.optim.AdamRange:
        states = (tensor.data_ptr() for tensor in (self.master, self.momentum, self.variance))
        grad, new = self.grad.data_ptr(), 0 if param is None else param.data_ptr()
        return _C.optim.AdamRange(*states, grad, _C.DType.BFLOAT16, new, _C.DType.BFLOAT16, self.master.numel())

    def _scalars(self, grad_scale: float = CLIPPING / LOSS_SCALE, lr: float = OPTIONS["lr"]) -> _C.optim.AdamScalars:
        return adam_scalars(self._num_steps, grad_scale, lr)

    def _run(self, kernel: Callable, arrays: _C.optim.AdamRange, scalars: _C.optim.AdamScalars, *more: Any) -> None:
        kernel(self.isa, arrays, scalars, self._num_threads, *more)

    @property
    def param(self) -> torch.Tensor:
        return self.grad


class InPlaceAdam:
    """Passes of split masters, over arrays as training leaves them."""

    def __init__(self, master: torch.Tensor, grad: torch.Tensor, num_threads: int) -> None:
        numel = master.numel()
        self._grad = huge_copy(grad)
        self._momentum, self._variance = huge_copy(grad.float() * 0.1), huge_copy(grad.float().square())
        self._param, self._lower = huge_zeros(numel, torch.bfloat16), huge_zeros(numel, torch.int16)
        self._isa, self._num_threads = _C.optim.isa(), num_threads
        whole = (master.contiguous(), self._param, self._lower, self._variance)
        _C.optim.split_master(self._isa, *(tensor.data_ptr() for tensor in whole), numel)
        pieces = -(-numel // _C.optim.SCALE_DEPENDENT_PIECE)
        self._open = torch.zeros(pieces, _C.optim.OPEN_LOG_BYTES, dtype=torch.uint8)

    def put_pass(self) -> None:
        self._run(_C.optim.put_values, 1.0, 1.0, _C.optim.SCALE_DEPENDENT_PIECE // 16)

    def put_between_pass(self) -> None:
        self._run(_C.optim.put_values, 0.9, 1.1, _C.optim.SCALE_DEPENDENT_PIECE // 16)

    def behind_pass(self) -> None:
        self._run(_C.optim.put_states, 1.0, 1.0)

    def _run(self, kernel: Callable, grad_scale: float, *more: Any) -> None:
        states = (_C.optim.StateArray(self._lower.data_ptr(), _C.StateType.LOWER_HALF), self._momentum.data_ptr())
        grad, param = ((tensor.data_ptr(), _C.DType.BFLOAT16) for tensor in (self._grad, self._param))
        arrays = _C.optim.AdamRange(*states, self._variance.data_ptr(), *grad, *param, self._grad.numel())
        scalars = adam_scalars(math.inf, grad_scale, FINE_TUNING_LR)
        kernel(self._isa, arrays, scalars, self._num_threads, self._open.data_ptr(), *more)


class TorchAdam:
    """torch's operations for the same work, in place where possible."""

    def __init__(self, master: torch.Tensor, grad: torch.Tensor) -> None:
        self.grad = huge_copy(grad)
        self.param = huge_zeros(grad.numel(), grad.dtype)
        self._grad32 = huge_zeros(master.numel(), torch.float32)
        self._master = torch.nn.Parameter(huge_copy(master))
        self._master.grad = self._grad32
        self._optimizer = torch.optim.AdamW([self._master], fused=True, **OPTIONS)
        self._optimizer.state[self._master] = {
            "step": torch.tensor(0.0),
            "exp_avg": huge_zeros(master.numel(), torch.float32),
            "exp_avg_sq": huge_zeros(master.numel(), torch.float32),
        }

    @property
    def master(self) -> torch.Tensor:
        return self._master.detach()

    def step(self) -> None:
        self._grad32.copy_(self.grad)
        self._grad32.mul_(1 / LOSS_SCALE)
        torch.nn.utils.clip_grad_norm_([self._master], MAX_NORM)
        self._optimizer.step()
        self.param.copy_(self._master.detach())

    def update(self) -> None:
        self._grad32.copy_(self.grad)
        self._grad32.mul_(1 / LOSS_SCALE)  # torch.amp.GradScaler.unscale_
        self._grad32.mul_(CLIPPING)  # what clip_grad_norm_ does once it has the norm
        self._optimizer.step()
        self.param.copy_(self._master.detach())


class Copies:
    """Copies of one large buffer to another: torch's copy_, and memcpy by several threads."""

    def __init__(self, numel: int, num_threads: int) -> None:
        self._source, self._target = (huge_zeros(2 * numel, torch.float32) for _ in range(2))
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads)

    @property
    def num_bytes(self) -> int:
        """Bytes read and written by one copy."""
        return 2 * self._source.nbytes

    def by_torch(self) -> None:
        self._target.copy_(self._source)

    def by_memcpy(self) -> None:
        share = self._source.nbytes // self._num_threads

        def copy(index: int) -> None:  # ctypes releases the GIL
            offset = index * share
            ctypes.memmove(self._target.data_ptr() + offset, self._source.data_ptr() + offset, share)

        list(self._pool.map(copy, range(self._num_threads)))

    def close(self) -> None:
        self._pool.shutdown()


def check_equal_work(ours: OurAdam, torchs: TorchAdam, atol: float) -> None:
    """Raises RuntimeError if the two differ after the same steps from one state."""
    if not torch.allclose(ours.master, torchs.master, rtol=1e-6, atol=atol):
        raise RuntimeError("the two Adams disagree about the float32 parameters; nothing was timed")
    if not torch.allclose(ours.param, torchs.param, rtol=2**-7, atol=atol):  # a rounding boundary between them
        raise RuntimeError("the two Adams disagree about the bfloat16 parameters; nothing was timed")


def median_seconds(cases: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Each case's median over `repeats` rounds. Every round runs all cases, each often enough to be timed."""
    calls = {}
    for name, function in cases.items():
        function()
        begin = time.perf_counter()
        function()
        calls[name] = max(1, round(_MIN_SECONDS_PER_CALL / (time.perf_counter() - begin)))
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, function in cases.items():
            begin = time.perf_counter()
            for _ in range(calls[name]):
                function()
            seconds[name].append((time.perf_counter() - begin) / calls[name])
    return {name: statistics.median(values) for name, values in seconds.items()}


def run(args: argparse.Namespace) -> dict:
    """Measures with `numel`, `num_threads` and `repeats` of `args`; GB are 10**9 bytes, times medians."""
    torch.set_num_threads(args.num_threads)
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(args.numel, generator=generator) * 0.02
    grad = torch.randn(args.numel, generator=generator).to(torch.bfloat16)
    ours, torchs = OurAdam(master, grad, args.num_threads), TorchAdam(master, grad)
    ours.update()
    torchs.update()
    check_equal_work(ours, torchs, atol=1e-7)
    ours.grad.copy_(grad)
    ours.step()
    torchs.step()
    # torch sums the norm in float32: 0.03 % off at 16 Mi elements.
    check_equal_work(ours, torchs, atol=0.01 * OPTIONS["lr"])
    ours.grad.copy_(grad)
    copies = Copies(args.numel, args.num_threads)
    in_place = InPlaceAdam(master, grad, args.num_threads)
    cases = {
        "our_update": ours.update, "torch_update": torchs.update, "our_step": ours.step, "param_pass": ours.param_pass,
        "states_pass": ours.states_pass, "between_pass": ours.between_pass, "open_pass": ours.open_pass,
        "put_pass": in_place.put_pass, "put_between_pass": in_place.put_between_pass,
        "behind_pass": in_place.behind_pass, "torch_step": torchs.step, "copy_": copies.by_torch,
        "memcpy": copies.by_memcpy,
    }  # fmt: skip
    seconds = median_seconds(cases, args.repeats)
    copies.close()
    copy_by = min(("copy_", "memcpy"), key=seconds.__getitem__)
    copy_gbps = copies.num_bytes / seconds[copy_by] / 1e9
    adam_gbps = BYTES_PER_PARAM * args.numel / seconds["our_update"] / 1e9
    shares = {name: num_bytes * args.numel / seconds[name] / 1e9 / copy_gbps for name, num_bytes in _PASSES.items()}
    ns_per_param = {name: value / args.numel * 1e9 for name, value in seconds.items()}
    return {
        "case": "adam",
        "speedup_vs_torch": seconds["torch_update"] / seconds["our_update"],
        "step_speedup_vs_torch": seconds["torch_step"] / seconds["our_step"],
        "share_of_copy_bandwidth": adam_gbps / copy_gbps,
        "adam_gbps": adam_gbps,
        "copy_gbps": copy_gbps,
        "copy_by": copy_by,
        "adam_ns_per_param": ns_per_param["our_update"],
        "torch_ns_per_param": ns_per_param["torch_update"],
        **{f"{name}_ns_per_param": ns_per_param[name] for name in _PASSES},
        **{f"{name}_share_of_copy_bandwidth": share for name, share in shares.items()},
        "open_pass_ns_per_param": ns_per_param["open_pass"],
        "open_share": ours.open_share,
        "adam_step_ns_per_param": ns_per_param["our_step"],
        "torch_step_ns_per_param": ns_per_param["torch_step"],
        "numel": args.numel,
        "num_threads": args.num_threads,
        "repeats": args.repeats,
        **provenance(),
    }


def format_table(result: dict) -> str:
    rows = [
        ("update, ours", f"{result['adam_ns_per_param']:.3f} ns/param", f"{result['adam_gbps']:.1f} GB/s"),
        ("update, torch", f"{result['torch_ns_per_param']:.3f} ns/param", ""),
        ("step with norm, ours", f"{result['adam_step_ns_per_param']:.3f} ns/param", ""),
        ("step with norm, torch", f"{result['torch_step_ns_per_param']:.3f} ns/param", ""),
        *(
            (f"{name.replace('_', ' ')} pass", f"{result[f'{name}_pass_ns_per_param']:.3f} ns/param",
             f"{result[f'{name}_pass_share_of_copy_bandwidth']:.2f} of the copy")
            for name in ("param", "states", "between", "put", "put_between", "behind")
        ),
        ("open pass", f"{result['open_pass_ns_per_param']:.3f} ns/param", f"{result['open_share']:.2%} are open"),
        (f"copy ({result['copy_by']})", "", f"{result['copy_gbps']:.1f} GB/s"),
        ("speed against torch", f"{result['speedup_vs_torch']:.2f} x", f"goal {GOALS['speedup_vs_torch']:.1f} x"),
        ("  with the norm", f"{result['step_speedup_vs_torch']:.2f} x", ""),
        ("share of copy bandwidth", f"{result['share_of_copy_bandwidth']:.2f}",
         f"goal {GOALS['share_of_copy_bandwidth']:.1f}"),
    ]  # fmt: skip
    title = (
        f"CPU AdamW, {result['numel']:,} parameters, {result['num_threads']} threads, {result['isa']}, "
        f"{result['cpu']}, torch {result['torch_version']}"
    )
    return "\n".join([title, *(f"  {name:<26}{first:>16}  {second}" for name, first, second in rows)])

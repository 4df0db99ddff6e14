"""CPU updates by storage type of master and moments, as shares of the speed of a copy.

One fused pass each over the same parameters: a scaled bfloat16 gradient updates master and moments, and the new
bfloat16 parameter is written. The bytes of a pass per parameter: the gradient (2), the parameter (2; 4 where the old
value is read too, beside split or missing masters), and each state twice. With whole masters the parameter overwrites
the gradient, as in an engine. A copy reads and writes two large buffers; all arrays lie on huge pages, and the rounds
are interleaved.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

import torch

from benchmark.adam import Copies, huge_zeros, median_seconds
from benchmark.common import provenance
from patrickstar import _C
from patrickstar.planning.update_costs import traffic_bytes

GOAL = 0.85
_TYPES = _C.StateType
_BETAS, _LR = (0.9, 0.999), 1e-3


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Storage types of an optimizer's states."""

    name: str
    master: _C.StateType
    momentum: _C.StateType
    variance: _C.StateType
    rule: _C.MomentumRule | None = None
    """None: Adam."""

    @property
    def reads_param(self) -> bool:
        """True if the old parameter holds the master or its upper half."""
        return self.master != _TYPES.FLOAT32

    def traffic(self) -> float:
        """Bytes read and written per parameter."""
        return traffic_bytes(_C.StateFormat(self.master, self.momentum, self.variance))


SCHEMES = (
    Scheme("adam, fp32", _TYPES.FLOAT32, _TYPES.FLOAT32, _TYPES.FLOAT32),
    Scheme("adam, fp32, split master", _TYPES.LOWER_HALF, _TYPES.FLOAT32, _TYPES.FLOAT32),
    Scheme("adam, bf16", _TYPES.FLOAT32, _TYPES.BFLOAT16, _TYPES.BFLOAT16),
    Scheme("adam, 8bit", _TYPES.FLOAT32, _TYPES.SIGNED8, _TYPES.UNSIGNED8),
    Scheme("adam, bf16, no master", _TYPES.NONE, _TYPES.BFLOAT16, _TYPES.BFLOAT16),
    Scheme("adam, 8bit, no master", _TYPES.NONE, _TYPES.SIGNED8, _TYPES.UNSIGNED8),
    Scheme("lion, fp32", _TYPES.FLOAT32, _TYPES.FLOAT32, _TYPES.NONE, _C.MomentumRule.LION),
    Scheme("lion, 8bit, no master", _TYPES.NONE, _TYPES.SIGNED8, _TYPES.NONE, _C.MomentumRule.LION),
    Scheme("sgd, fp32", _TYPES.FLOAT32, _TYPES.FLOAT32, _TYPES.NONE, _C.MomentumRule.SGD),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--numel", type=int, default=64 * 2**20, help="parameters")
    parser.add_argument("--num-threads", type=int, default=_C.num_available_cpus(), help="default: all, %(default)s")
    parser.add_argument("--repeats", type=int, default=11, help="interleaved rounds")


class _State:
    """One state array and its memory."""

    def __init__(self, kind: _C.StateType, numel: int):
        dtype = {_TYPES.FLOAT32: torch.float32, _TYPES.LOWER_HALF: torch.int16, _TYPES.BFLOAT16: torch.bfloat16}
        self._data = None if kind == _TYPES.NONE else huge_zeros(numel, dtype.get(kind, torch.uint8))
        is_8_bit = kind in (_TYPES.SIGNED8, _TYPES.UNSIGNED8)
        self._scales = huge_zeros(-(-numel // _C.optim.STATE_BLOCK), torch.float32) if is_8_bit else None
        data, scales = (0 if memory is None else memory.data_ptr() for memory in (self._data, self._scales))
        self.array = _C.optim.StateArray(data, kind, scales)

    def fill(self, values: torch.Tensor) -> None:
        if self._data is not None and self._data.dtype == torch.float32:
            self._data.copy_(values)


class _Update:
    def __init__(self, scheme: Scheme, master: torch.Tensor, grad: torch.Tensor, threads: int):
        numel = master.numel()
        self._scheme, self._threads, self._numel = scheme, threads, numel
        self._states = [_State(kind, numel) for kind in (scheme.master, scheme.momentum, scheme.variance)]
        self._states[0].fill(master)
        self._grad = huge_zeros(numel, torch.bfloat16).copy_(grad)
        self._param = huge_zeros(numel, torch.bfloat16).copy_(master) if scheme.reads_param else self._grad
        self._num_steps = 0

    def __call__(self) -> None:
        self._num_steps += 1
        key = _C.optim.random_key(0, self._num_steps, 0, 0)
        arrays = [state.array for state in self._states]
        memory = (self._grad.data_ptr(), _C.DType.BFLOAT16, self._param.data_ptr(), _C.DType.BFLOAT16)
        range_ = _C.optim.AdamRange(*arrays, *memory, self._numel, key=key)
        _C.optim.update(_C.optim.isa(), range_, self._scalars(), self._threads)

    def _scalars(self) -> _C.optim.AdamScalars | _C.optim.MomentumScalars:
        common = {"grad_scale": 1.0, "weight_decay": 0.0, "decay": 1 - _LR * 0.01}
        beta1, beta2 = _BETAS
        if self._scheme.rule is None:
            return _C.optim.AdamScalars(
                **common, beta2=beta2, one_minus_beta1=1 - beta1, one_minus_beta2=1 - beta2, eps=1e-8,
                inv_sqrt_bias_correction2=(1 - beta2**self._num_steps) ** -0.5,
                step_size=_LR / (1 - beta1**self._num_steps),
            )  # fmt: skip
        if self._scheme.rule == _C.MomentumRule.LION:
            own = {"one_minus_beta1": 1 - beta1, "one_minus_beta2": 0.01}
        else:
            own = {"momentum_factor": 0.9, "one_minus_dampening": 1.0}
        return _C.optim.MomentumScalars(self._scheme.rule, **common, step_size=_LR, **own)


def run(args: argparse.Namespace) -> dict:
    """Measures all schemes; GB are 10**9 bytes, times medians."""
    torch.set_num_threads(args.num_threads)
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(args.numel, generator=generator) * 0.02
    grad = torch.randn(args.numel, generator=generator).to(torch.bfloat16)
    copies = Copies(args.numel, args.num_threads)  # small copies go through caches and are slower
    cases: dict[str, Callable[[], None]] = {s.name: _Update(s, master, grad, args.num_threads) for s in SCHEMES}
    seconds = median_seconds({**cases, "copy_": copies.by_torch, "memcpy": copies.by_memcpy}, args.repeats)
    copies.close()
    copy_gbps = copies.num_bytes / min(seconds["copy_"], seconds["memcpy"]) / 1e9
    schemes = [
        {
            "name": scheme.name,
            "bytes_per_param": scheme.traffic(),
            "ns_per_param": seconds[scheme.name] / args.numel * 1e9,
            "share_of_copy_bandwidth": scheme.traffic() * args.numel / seconds[scheme.name] / 1e9 / copy_gbps,
        }
        for scheme in SCHEMES
    ]
    own = {"numel": args.numel, "num_threads": args.num_threads, "repeats": args.repeats}
    return {"case": "schemes", "copy_gbps": copy_gbps, "schemes": schemes, **own, **provenance()}


def format_table(result: dict) -> str:
    title = (
        f"CPU updates, {result['numel']:,} parameters, {result['num_threads']} threads, {result['isa']}, "
        f"{result['cpu']}; a copy moves {result['copy_gbps']:.1f} GB/s; goal {GOAL:.2f} of it"
    )
    rows = (
        f"  {row['name']:<26}{row['bytes_per_param']:>6.2f} bytes/param  {row['ns_per_param']:.3f} ns/param  "
        f"{row['share_of_copy_bandwidth']:.2f} of the copy"
        for row in result["schemes"]
    )
    return "\n".join([title, *rows])

"""Calls of the leaf kernels: tensors in, raw addresses out."""

import math
from dataclasses import dataclass

import torch

from patrickstar import _C
from tests.bits import assert_same_bits

DTYPES = {torch.float32: _C.DType.FLOAT32, torch.bfloat16: _C.DType.BFLOAT16, torch.float16: _C.DType.FLOAT16}
HALVES = [torch.bfloat16, torch.float16]
ISAS = _C.optim.supported_isas()
AdamScalars, MomentumScalars = _C.optim.AdamScalars, _C.optim.MomentumScalars
CANONICAL_NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
SPECIALS = [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, -1.1754944e-38, 6e-8, -6.1e-5, 1.0, -1.0, 65504.0, 65519.996,
            65520.0, -65536.0, 3.4028235e38, -3.4e38, math.inf, -math.inf, math.nan, -math.nan]  # fmt: skip


def adam_scalars(step, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=True, grad_scale=1.0):
    """The fields of AdamScalars for step `step` (from 1), computed in float64."""
    beta1, beta2 = betas
    return {
        "grad_scale": grad_scale,
        "weight_decay": 0.0 if decoupled else weight_decay,
        "decay": 1.0 - lr * weight_decay if decoupled else 1.0,
        "beta2": beta2,
        "one_minus_beta1": 1.0 - beta1,
        "one_minus_beta2": 1.0 - beta2,
        "inv_sqrt_bias_correction2": 1.0 / math.sqrt(1.0 - beta2**step),
        "eps": eps,
        "step_size": lr / (1.0 - beta1**step),
    }


def random_values(numel, dtype, generator, wild):
    """Ordinary values or, when wild, any bit pattern and all special values."""
    if not wild:
        return (torch.randn(numel, generator=generator) * 0.1).to(dtype)
    integers = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(integers)
    values = torch.randint(limits.min, limits.max + 1, (numel,), generator=generator).to(integers).view(dtype)
    ordinary = torch.randn(numel, generator=generator).to(dtype)
    special = torch.tensor(SPECIALS)[torch.randint(len(SPECIALS), (numel,), generator=generator)].to(dtype)
    kind = torch.randint(4, (numel,), generator=generator)
    return torch.where(kind == 0, values, torch.where(kind == 1, special, ordinary))


@dataclass
class AdamArrays:
    """One range of Adam's arrays; param may be None, and shares grad's memory when in_place."""

    master: torch.Tensor
    momentum: torch.Tensor
    variance: torch.Tensor
    grad: torch.Tensor
    param: torch.Tensor | None
    in_place: bool = False

    def clone(self, device="cpu", misalign=0):
        """A copy with the same sharing, each array `misalign` elements into its memory."""

        def copy(tensor):
            memory = torch.empty(tensor.numel() + misalign, dtype=tensor.dtype, device=device)
            memory[misalign:].copy_(tensor)
            return memory[misalign:]

        grad = copy(self.grad)
        param = self.param
        if param is not None:
            param = grad.view(param.dtype) if self.in_place else copy(param)
        return AdamArrays(copy(self.master), copy(self.momentum), copy(self.variance), grad, param, self.in_place)

    def outputs(self):
        named = {"master": self.master, "momentum": self.momentum, "variance": self.variance, "param": self.param}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def range(self, **options):
        param = (0, DTYPES[torch.float32]) if self.param is None else (address(self.param), DTYPES[self.param.dtype])
        states = (address(self.master), address(self.momentum), address(self.variance))
        grad = (address(self.grad), DTYPES[self.grad.dtype])
        return _C.optim.AdamRange(*states, *grad, *param, self.master.numel(), **options)


def address(tensor):
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def make_arrays(numel, grad_dtype, param_dtype, *, in_place, seed, wild):
    generator = torch.Generator().manual_seed(seed)
    floats = [random_values(numel, torch.float32, generator, wild) for _ in range(3)]
    if not wild:
        floats[2] = floats[2].square()
    grad = random_values(numel, grad_dtype, generator, wild)
    param = None
    if param_dtype is not None:
        param = grad.view(param_dtype) if in_place else torch.zeros(numel, dtype=param_dtype)
    return AdamArrays(*floats, grad, param, in_place)


def run_adam(isa, arrays, scalars, num_threads=1):
    _C.optim.update(isa, arrays.range(), AdamScalars(**scalars), num_threads)


def cast_from_float(isa, values, dtype, num_threads=1):
    out = torch.empty(values.numel(), dtype=dtype)
    _C.optim.cast_from_float(isa, address(values), address(out), DTYPES[dtype], values.numel(), num_threads)
    return out


def cast_to_float(isa, values, num_threads=1):
    out = torch.empty(values.numel(), dtype=torch.float32)
    _C.optim.cast_to_float(isa, address(values), DTYPES[values.dtype], address(out), values.numel(), num_threads)
    return out


def sum_squares(isa, values, num_threads=1):
    partials = torch.full((-(-values.numel() // _C.optim.SQUARES_BLOCK),), -1.0, dtype=torch.float64)
    _C.optim.sum_squares(isa, address(values), DTYPES[values.dtype], values.numel(), address(partials), num_threads)
    return partials


def add_up(partials, first=0, count=None):
    return _C.optim.add_up(address(partials), first, partials.numel() - first if count is None else count)


def check_other_passes(isa, make_scalars, initial, expected, scalars, most_scale_dependent):
    """New states apart from the old ones, the parameter alone with the states in phase two, and values that are the
    same for all scales between two: each gives one update's bits. An update's memory ends with its parameter.
    """

    def call(name, update, *more, factor=1.0, **options):
        own = make_scalars(**{**scalars, "grad_scale": scalars["grad_scale"] * factor})
        getattr(_C.optim, name)(isa, update.range(**options), own, 2, *more)

    numel, untouched = len(initial.grad), initial.memory()[:-1]
    update, new = initial.copy(3), initial.copy(3)
    call("update", update, new_states=new.states())
    assert_same_bits([*new.memory()[:-1], update.param], expected.memory(), "new states")
    assert_same_bits(update.memory()[:-1], untouched, "old states")

    update = initial.copy()
    call("update_param", update)
    assert_same_bits(update.param, expected.param, "parameter alone")
    assert_same_bits(update.memory()[:-1], untouched, "only read")
    call("update", update, with_param=False)
    assert_same_bits(update.memory(), expected.memory(), "states in phase two")

    update = initial.copy()
    logs = torch.zeros(-(-numel // _C.optim.SCALE_DEPENDENT_PIECE), _C.optim.OPEN_LOG_BYTES, dtype=torch.uint8)
    call("update_param_between", update, address(logs), scalars["grad_scale"] * 1.02, factor=0.98)
    counts = logs[:, :8].contiguous().view(torch.int64)
    assert (counts >= 0).all() and counts.sum() < most_scale_dependent and (counts.sum() > 0 or numel < 1000)
    call("update_param_scale_dependent", update, address(logs))
    assert_same_bits(update.param, expected.param, "scale-independent and scale-dependent")
    assert_same_bits(update.memory()[:-1], untouched, "only read")

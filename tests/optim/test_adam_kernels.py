import dataclasses
import math
from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C
from tests.bits import assert_same_bits, bits
from tests.distributed import run_python
from tests.optim.kernel_calls import (
    CANONICAL_NAN,
    DTYPES,
    HALVES,
    ISAS,
    AdamScalars,
    adam_scalars,
    address,
    cast_from_float,
    cast_to_float,
    make_arrays,
    random_values,
    run_adam,
)

SCALARS = {
    "adamw": adam_scalars(3, weight_decay=0.1, grad_scale=0.37),
    "adam_l2": adam_scalars(1, lr=0.3, weight_decay=0.1, decoupled=False),
    "no_eps": adam_scalars(1000, eps=0.0, grad_scale=2.0**-16),
    "tiny": adam_scalars(2, lr=1e-30, eps=1.2e-38, grad_scale=1.2e-38),
    "infinite": adam_scalars(5, weight_decay=0.1, grad_scale=math.inf),
}
# Around the lengths at which the kernels change course: a vector, the main loop's stride, the skew between
# streams, a block of threads' work, streaming stores.
SIZES = [0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257, 287, 288, 289, 1000, 4095, 4097, 70001]


@st.composite
def adam_cases(draw):
    grad_dtype = draw(st.sampled_from(list(DTYPES)))
    param_dtype = draw(st.sampled_from([None, *DTYPES]))
    same_size = param_dtype is not None and param_dtype.itemsize == grad_dtype.itemsize
    return {
        "numel": draw(st.one_of(st.sampled_from(SIZES), st.integers(0, 700))),
        "grad_dtype": grad_dtype,
        "param_dtype": param_dtype,
        "in_place": same_size and draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
        "wild": draw(st.booleans()),
    }


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    case=adam_cases(),
    scalars=st.sampled_from(sorted(SCALARS)),
    misalign=st.integers(0, 17),
    num_threads=st.integers(1, 3),
)
def test_every_isa_gives_the_scalar_bits(case, scalars, misalign, num_threads):
    initial = make_arrays(**case)
    expected = initial.clone()
    run_adam("scalar", expected, SCALARS[scalars])
    for isa in ISAS:
        arrays = initial.clone(misalign=misalign)
        run_adam(isa, arrays, SCALARS[scalars], num_threads)
        for name, tensor in arrays.outputs().items():
            assert_same_bits(tensor, expected.outputs()[name], f"{isa} {name}")
        if not case["in_place"]:
            assert_same_bits(arrays.grad, initial.grad, f"{isa} grad, only read")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("misalign", [0, 5])
@pytest.mark.parametrize("numel", [*SIZES, 300_000])
def test_new_states_apart_from_the_old(isa, numel, misalign):
    """300,000 elements are written past the cache."""
    initial = make_arrays(numel, torch.bfloat16, torch.bfloat16, in_place=False, seed=3, wild=True)
    expected = initial.clone()
    run_adam("scalar", expected, SCALARS["adamw"])
    arrays = initial.clone(misalign=misalign)
    apart = initial.clone(misalign=misalign)
    new_states = [address(tensor) for tensor in (apart.master, apart.momentum, apart.variance)]
    _C.optim.update(isa, arrays.range(new_states=new_states), AdamScalars(**SCALARS["adamw"]), 2)
    for name in ("master", "momentum", "variance"):
        assert_same_bits(getattr(apart, name), getattr(expected, name), f"{isa} new {name}")
        assert_same_bits(getattr(arrays, name), getattr(initial, name), f"{isa} old {name}")
    assert_same_bits(arrays.param, expected.param, f"{isa} param")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtypes", [(a, b) for a in DTYPES for b in DTYPES], ids=str)
def test_parameters_alone_and_states_behind(isa, dtypes):
    for numel, scalars, misalign, wild in [(70_001, "adamw", 0, True), (300_000, "adam_l2", 5, False)]:
        initial = make_arrays(numel, *dtypes, in_place=False, seed=4, wild=wild)
        expected = initial.clone()
        run_adam("scalar", expected, SCALARS[scalars])
        arrays = initial.clone(misalign=misalign)
        _C.optim.update_param(isa, arrays.range(), AdamScalars(**SCALARS[scalars]), 2)
        assert_same_bits(arrays.param, expected.param, f"{isa} param")
        for name in ("master", "momentum", "variance", "grad"):
            assert_same_bits(getattr(arrays, name), getattr(initial, name), f"{isa} {name}, only read")
        run_adam(isa, dataclasses.replace(arrays, param=None), SCALARS[scalars])
        for name, tensor in arrays.outputs().items():
            assert_same_bits(tensor, expected.outputs()[name], f"{isa} {name}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("numel", SIZES)
def test_nothing_outside_the_range_is_written(isa, numel):
    memory = make_arrays(numel + 40, torch.bfloat16, torch.float16, in_place=False, seed=1, wild=True)
    before = memory.clone()
    inner = type(memory)(*(t[20 : 20 + numel] for t in (memory.master, memory.momentum, memory.variance, memory.grad,
                                                         memory.param)))  # fmt: skip
    run_adam(isa, inner, SCALARS["adamw"])
    for name, tensor in memory.outputs().items():
        for part in (slice(0, 20), slice(20 + numel, None)):
            assert_same_bits(tensor[part], before.outputs()[name][part], f"{isa} {name} outside the range")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("in_place", [True, False])
def test_split_and_streaming_stores_change_nothing(isa, in_place):
    # 300,000 elements are above the length from which a separate parameter is written around the cache.
    initial = make_arrays(300_000, torch.bfloat16, torch.bfloat16, in_place=in_place, seed=2, wild=True)
    whole, threaded, pieces = initial.clone(), initial.clone(), initial.clone()
    run_adam(isa, whole, SCALARS["adamw"])
    run_adam(isa, threaded, SCALARS["adamw"], num_threads=4)
    for begin, end in ((0, 1), (1, 130_001), (130_001, 130_050), (130_050, 300_000)):
        arrays = (pieces.master, pieces.momentum, pieces.variance, pieces.grad, pieces.param)
        run_adam(isa, type(pieces)(*(t[begin:end] for t in arrays)), SCALARS["adamw"])
    for name, tensor in whole.outputs().items():
        assert_same_bits(threaded.outputs()[name], tensor, f"{name}, 4 threads")
        assert_same_bits(pieces.outputs()[name], tensor, f"{name}, 4 pieces")


@pytest.mark.parametrize("isa", ISAS)
def test_the_callers_flushing_of_denormals_changes_nothing(isa):
    initial = make_arrays(1000, torch.float16, torch.float16, in_place=False, seed=3, wild=True)
    expected, flushed = initial.clone(), initial.clone()
    run_adam(isa, expected, SCALARS["tiny"])
    x = random_values(1000, torch.float32, torch.Generator().manual_seed(4), wild=True)
    half = cast_from_float(isa, x, torch.float16)
    wide = cast_to_float(isa, half)
    if not torch.set_flush_denormal(True):
        raise AssertionError("this processor cannot flush denormals")
    try:
        run_adam(isa, flushed, SCALARS["tiny"])
        assert_same_bits(cast_from_float(isa, x, torch.float16), half, "cast_from_float")
        assert_same_bits(cast_to_float(isa, half), wide, "cast_to_float")
        still_flushing = (torch.full((1,), 1e-38) * 0.1).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert still_flushing, "the caller's own setting must be as before"
    for name, tensor in flushed.outputs().items():
        assert_same_bits(tensor, expected.outputs()[name], name)


def exact_fma(a, b, c):
    """fma of three finite binary32 numbers, rounded once, by rational arithmetic."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = numpy.float32(float(exact))
    below, above = numpy.nextafter(near, numpy.float32(-numpy.inf)), numpy.nextafter(near, numpy.float32(numpy.inf))

    def distance_then_odd(candidate):
        return abs(Fraction(float(candidate)) - exact), int(candidate.view(numpy.int32)) & 1

    return min((near, below, above), key=distance_then_odd)


def exact_adam(p, m, v, g, scalars):
    """[Note: one order of operations] element by element; arguments and results are numpy.float32."""
    s = {name: numpy.float32(value) for name, value in scalars.items()}
    g = g * s["grad_scale"]
    g = exact_fma(s["weight_decay"], p, g)
    p = p * s["decay"]
    m = exact_fma(s["one_minus_beta1"], g - m, m)
    v = exact_fma(s["one_minus_beta2"] * g, g, s["beta2"] * v)
    d = exact_fma(numpy.sqrt(v), s["inv_sqrt_bias_correction2"], s["eps"])
    return exact_fma(-s["step_size"], m / d, p), m, v


@pytest.mark.parametrize("scalars", ["adamw", "adam_l2", "tiny"])
@pytest.mark.parametrize("grad_dtype", list(DTYPES))
def test_bits_are_those_of_exact_arithmetic(scalars, grad_dtype):
    arrays = make_arrays(400, grad_dtype, torch.bfloat16, in_place=False, seed=5, wild=False)
    arrays.master[:20], arrays.variance[5:25], arrays.grad[10:30] = 1e-41, 3e-43, 0.0
    columns = [t.float().numpy().copy() for t in (arrays.master, arrays.momentum, arrays.variance, arrays.grad)]
    rows = [exact_adam(*row, SCALARS[scalars]) for row in zip(*columns, strict=True)]
    expected = [torch.from_numpy(numpy.array(column, dtype=numpy.float32)) for column in zip(*rows, strict=True)]
    run_adam("scalar", arrays, SCALARS[scalars])
    for name, column in zip(("master", "momentum", "variance"), expected, strict=True):
        assert_same_bits(arrays.outputs()[name], column, name)
    assert_same_bits(arrays.param, expected[0].to(torch.bfloat16), "param")


def adam_in_float64(p, grads, *, lr, betas, eps, weight_decay, decoupled):
    """Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2."""
    p, m, v = p.double(), torch.zeros_like(p, dtype=torch.float64), torch.zeros_like(p, dtype=torch.float64)
    for step, grad in enumerate(grads, 1):
        g = grad.double() + (0.0 if decoupled else weight_decay) * p
        p = p * (1 - lr * weight_decay) if decoupled else p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        p = p - lr * (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    return p


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_twenty_steps_agree_with_torch_and_float64(isa, decoupled, weight_decay):
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    generator = torch.Generator().manual_seed(6)
    initial = torch.randn(5000, generator=generator)
    grads = [torch.randn(5000, generator=generator) * 0.1 for _ in range(20)]
    reference = torch.nn.Parameter(initial.clone())
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([reference], **options)
    arrays = make_arrays(5000, torch.float32, None, in_place=False, seed=0, wild=False)
    arrays.master.copy_(initial)
    arrays.momentum.zero_()
    arrays.variance.zero_()
    for step, grad in enumerate(grads, 1):
        reference.grad = grad
        optimizer.step()
        arrays.grad.copy_(grad)
        run_adam(isa, arrays, adam_scalars(step, decoupled=decoupled, **options))
    oracle = adam_in_float64(initial, grads, decoupled=decoupled, **options)
    to_torch = ((arrays.master - reference.detach()).norm() / reference.detach().norm()).item()
    ours = ((arrays.master - oracle).norm() / oracle.norm()).item()
    torchs = ((reference.detach() - oracle).norm() / oracle.norm()).item()
    print(f"{isa}: relative error to torch {to_torch:.1e}, to float64 {ours:.2e} (torch's own {torchs:.2e})")
    assert to_torch <= 1e-6
    assert ours <= 1.05 * torchs
    torch.testing.assert_close(arrays.master, reference.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_value_widens_exactly(isa, dtype):
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    wide = cast_to_float(isa, values)
    expected = values.to(torch.float32)
    numbers = ~values.isnan()
    assert torch.equal(bits(wide[numbers]), bits(expected[numbers]))
    payload = bits(values[~numbers]).int()
    shift, quiet = (16, 0) if dtype == torch.bfloat16 else (13, 0x7FC00000)
    magnitude = (payload & 0x7FFF) << shift
    signs = (payload & 0x8000) << 16
    assert torch.equal(bits(wide[~numbers]), signs | magnitude | quiet), "a NaN keeps its sign and payload"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", HALVES)
def test_casts_round_to_nearest_even_as_torch_does(isa, dtype):
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    values = values[values.isfinite()].sort().values.unique()
    ties = ((values[1:].double() + values[:-1].double()) / 2).float()
    infinity = torch.tensor(math.inf)
    around = [values, ties, ties.nextafter(infinity), ties.nextafter(-infinity)]
    wild = random_values(200_003, torch.float32, torch.Generator().manual_seed(7), wild=True)
    x = torch.cat([*around, wild])
    rounded, expected = cast_from_float(isa, x, dtype), x.to(dtype)
    numbers = ~x.isnan()
    print(f"{int(numbers.sum())} roundings, {ties.numel()} of them ties, {int((~numbers).sum())} NaN")
    assert_same_bits(rounded[numbers], expected[numbers], "rounding")
    assert (bits(rounded[~numbers]) == CANONICAL_NAN[dtype]).all()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    numel=st.one_of(st.sampled_from(SIZES), st.integers(0, 300)),
    dtype=st.sampled_from(list(DTYPES)),
    misalign=st.integers(0, 17),
    seed=st.integers(0, 2**31),
    num_threads=st.integers(1, 3),
)
def test_casts_and_sums_are_equal_on_every_isa(numel, dtype, misalign, seed, num_threads):
    generator = torch.Generator().manual_seed(seed)
    values = random_values(numel + misalign, torch.float32, generator, wild=True)[misalign:]
    x = random_values(numel + misalign, dtype, generator, wild=True)[misalign:]
    sums = random_values(numel + misalign, dtype, generator, wild=True)[misalign:]
    results = {}
    for isa in ISAS:
        added, wide = sums.clone(), values.clone()
        _C.optim.add(isa, address(added), address(x), DTYPES[dtype], numel, num_threads)
        _C.optim.add_to_float(isa, address(wide), address(x), DTYPES[dtype], numel, num_threads)
        results[isa] = {"narrow": cast_from_float(isa, values, dtype, num_threads), "added": added,
                        "wide": cast_to_float(isa, x, num_threads), "added to float": wide}  # fmt: skip
    for isa in ISAS:
        for name, tensor in results[isa].items():
            assert_same_bits(tensor, results["scalar"][name], f"{isa} {name}")
    for name, torchs in (("added", sums + x), ("added to float", values + x.float())):
        actual, numbers = results["scalar"][name], ~torchs.isnan()
        assert_same_bits(actual[numbers], torchs[numbers], f"{name}, against torch")
        assert (bits(actual[~numbers]) == CANONICAL_NAN[actual.dtype]).all()


def isa_of_a_process_with(value):
    code = "from patrickstar import _C; print(_C.optim.isa())"
    return run_python("-c", code, environment={"PATRICKSTAR_ISA": value})


@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_chooses_the_isa(isa):
    assert isa_of_a_process_with(isa).stdout.strip() == isa


def test_an_unknown_isa_is_refused_with_the_known_ones():
    message = isa_of_a_process_with("avx1024").stderr
    assert "ValueError" in message
    for part in ("PATRICKSTAR_ISA", "avx1024", "scalar, avx2, avx512", *ISAS):
        assert part in message
    assert isa_of_a_process_with("").stdout.strip() == ISAS[-1]


def test_wrong_arguments_are_refused():
    arrays = make_arrays(8, torch.float32, torch.float32, in_place=False, seed=0, wild=False)
    with pytest.raises(ValueError, match="avx1024.*scalar"):
        run_adam("avx1024", arrays, SCALARS["adamw"])
    with pytest.raises(ValueError, match="num_threads|thread pool"):
        run_adam("scalar", arrays, SCALARS["adamw"], num_threads=0)
    arrays.param = arrays.grad.view(torch.bfloat16)[:8]
    with pytest.raises(ValueError, match="2 bytes where grad's have 4"):
        run_adam("scalar", arrays, SCALARS["adamw"])

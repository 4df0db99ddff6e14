import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C
from tests.bits import assert_same_bits
from tests.optim import test_momentum_kernels as one_moment
from tests.optim.kernel_calls import (
    DTYPES,
    HALVES,
    AdamScalars,
    MomentumScalars,
    adam_scalars,
    add_up,
    address,
    cast_from_float,
    cast_to_float,
    make_arrays,
    random_values,
    run_adam,
    sum_squares,
)
from tests.optim.test_state_types import CASES, KEY, MOMENTS, State, Update

pytestmark = pytest.mark.gpu

SCALARS = {
    "adamw": adam_scalars(3, weight_decay=0.1, grad_scale=0.37),
    "adam_l2": adam_scalars(1, lr=0.3, weight_decay=0.1, decoupled=False),
    "no_eps": adam_scalars(1000, eps=0.0, grad_scale=2.0**-16),
    "tiny": adam_scalars(2, lr=1e-30, eps=1.2e-38, grad_scale=1.2e-38),
}
SPLIT = (_C.StateType.LOWER_HALF, _C.StateType.FLOAT32, _C.StateType.FLOAT32)
SIZES = [0, 1, 3, 4, 5, 255, 1023, 1024, 1025, 4095, 4096, 4097, 70_001]
NUMELS = st.one_of(st.sampled_from(SIZES), st.integers(0, 3000))
SEEDS = st.integers(0, 2**31)
MISALIGN = st.integers(0, 9)


def stream():
    return torch.cuda.current_stream().cuda_stream


def to_device(tensor, misalign=0):
    memory = torch.empty(tensor.numel() + misalign, dtype=tensor.dtype, device="cuda")[misalign:]
    return memory.copy_(tensor)


def check_adam(arrays, scalars, misalign=0):
    expected, device = arrays.clone(), arrays.clone("cuda", misalign)
    run_adam("scalar", expected, scalars)
    _C.optim.cuda_update(device.range(), AdamScalars(**scalars), stream())
    for name, tensor in device.outputs().items():
        assert_same_bits(tensor.cpu(), expected.outputs()[name], f"cuda {name}")


@pytest.mark.parametrize("scalars", SCALARS)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("misalign", [0, 3])
def test_adam_of_split_masters(scalars, grad_dtype, misalign):
    for numel in SIZES:
        arrays = make_arrays(numel, grad_dtype, torch.bfloat16, in_place=False, seed=numel, wild=True)
        ties = (torch.arange(numel) << 16 | 0x8000).int().view(torch.float32)
        master = torch.where(torch.arange(numel) % 3 == 0, ties, arrays.master)
        lower, variance = torch.empty(numel, dtype=torch.int16), arrays.variance.abs()
        _C.optim.split_master(
            "scalar", address(master), address(arrays.param), address(lower), address(variance), numel
        )
        states = (State(kind, data) for kind, data in zip(SPLIT, (lower, arrays.momentum, variance), strict=True))
        host = Update(*states, arrays.grad, arrays.param)
        device = update_on_device(host, misalign)
        host.run("scalar", SCALARS[scalars])
        _C.optim.cuda_update(device.range(), AdamScalars(**SCALARS[scalars]), stream())
        assert_same_bits(on_host(device.memory()), host.memory(), f"cuda, {numel} elements")


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    numel=NUMELS,
    grad_dtype=st.sampled_from(list(DTYPES)),
    param_dtype=st.sampled_from([None, *DTYPES]),
    seed=SEEDS,
    wild=st.booleans(),
    scalars=st.sampled_from(sorted(SCALARS)),
    misalign=MISALIGN,
)
def test_adam(numel, grad_dtype, param_dtype, seed, wild, scalars, misalign):
    arrays = make_arrays(numel, grad_dtype, param_dtype, in_place=False, seed=seed, wild=wild)
    check_adam(arrays, SCALARS[scalars], misalign)


@pytest.mark.parametrize("misalign", [0, 1, 4])
@pytest.mark.parametrize(
    ("grad_dtype", "param_dtype"),
    [(torch.float32, torch.float32), *((grad, param) for grad in HALVES for param in HALVES)],
)
def test_adam_with_the_parameter_in_the_gradients_place(grad_dtype, param_dtype, misalign):
    arrays = make_arrays(1_000_003, grad_dtype, param_dtype, in_place=True, seed=1, wild=True)
    check_adam(arrays, SCALARS["adamw"], misalign)


def test_twenty_steps_stay_equal():
    host = make_arrays(100_003, torch.bfloat16, torch.bfloat16, in_place=False, seed=2, wild=False)
    device = host.clone("cuda")
    for step in range(1, 21):
        grad = random_values(100_003, torch.bfloat16, torch.Generator().manual_seed(step), wild=False)
        host.grad.copy_(grad)
        device.grad.copy_(grad)
        scalars = adam_scalars(step, weight_decay=0.01, grad_scale=0.7)
        run_adam(_C.optim.isa(), host, scalars, num_threads=2)
        _C.optim.cuda_update(device.range(), AdamScalars(**scalars), stream())
    for name, tensor in device.outputs().items():
        assert_same_bits(tensor.cpu(), host.outputs()[name], name)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(numel=NUMELS, dtype=st.sampled_from(list(DTYPES)), seed=SEEDS, misalign=MISALIGN)
def test_casts_and_sums(numel, dtype, seed, misalign):
    generator = torch.Generator().manual_seed(seed)
    values = random_values(numel, torch.float32, generator, wild=True)
    x, sums = (random_values(numel, dtype, generator, wild=True) for _ in range(2))
    values_d, x_d, sums_d = (to_device(tensor, misalign) for tensor in (values, x, sums))
    narrow, wide = to_device(sums, misalign), to_device(values, misalign)
    optim, kind = _C.optim, DTYPES[dtype]

    optim.cuda_cast_from_float(address(values_d), address(narrow), kind, numel, stream())
    assert_same_bits(narrow.cpu(), cast_from_float("scalar", values, dtype), "cast_from_float")
    optim.cuda_cast_to_float(address(x_d), kind, address(wide), numel, stream())
    assert_same_bits(wide.cpu(), cast_to_float("scalar", x), "cast_to_float")
    optim.cuda_add(address(sums_d), address(x_d), kind, numel, stream())
    optim.add("scalar", address(sums), address(x), kind, numel, 1)
    assert_same_bits(sums_d.cpu(), sums, "add")
    optim.cuda_add_to_float(address(values_d), address(x_d), kind, numel, stream())
    optim.add_to_float("scalar", address(values), address(x), kind, numel, 1)
    assert_same_bits(values_d.cpu(), values, "add_to_float")


@pytest.mark.parametrize("dtype", HALVES)
def test_every_16_bit_value(dtype):
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    device, wide = values.cuda(), torch.empty(2**16, device="cuda")
    back = torch.empty(2**16, dtype=dtype, device="cuda")
    _C.optim.cuda_cast_to_float(address(device), DTYPES[dtype], address(wide), 2**16, stream())
    assert_same_bits(wide.cpu(), cast_to_float("scalar", values), "widening")
    _C.optim.cuda_cast_from_float(address(wide), address(back), DTYPES[dtype], 2**16, stream())
    assert_same_bits(back.cpu(), cast_from_float("scalar", wide.cpu(), dtype), "and back")


@settings(deadline=None, max_examples=100, derandomize=True)
@given(numel=NUMELS, dtype=st.sampled_from(list(DTYPES)), seed=SEEDS, misalign=MISALIGN, wild=st.booleans())
def test_sums_of_squares(numel, dtype, seed, misalign, wild):
    values = random_values(numel, dtype, torch.Generator().manual_seed(seed), wild)
    expected = sum_squares("scalar", values)
    device, partials = to_device(values, misalign), torch.zeros_like(expected, device="cuda")
    _C.optim.cuda_sum_squares(address(device), DTYPES[dtype], numel, address(partials), stream())
    assert_same_bits(partials.cpu(), expected, "partials")


def test_partials_are_added_up_to_the_same_bits():
    generator = torch.Generator().manual_seed(5)
    counts = torch.tensor([0, 1, 255, 256, 257, 66_000, 12, 513])
    first = counts.cumsum(0) - counts
    partials = torch.rand(int(counts.sum()), dtype=torch.float64, generator=generator)
    partials *= 10.0 ** torch.randint(-20, 20, partials.shape, generator=generator)
    partials[-1] = math.inf
    ranges = torch.stack([first, counts], dim=1).cuda()
    sums = torch.full((len(counts), 2), -1.0, dtype=torch.float64, device="cuda")
    device = partials.cuda()
    _C.optim.cuda_add_up(address(device), address(ranges), len(counts), address(sums), stream())
    expected = [add_up(partials, *pair) for pair in zip(first.tolist(), counts.tolist(), strict=True)]
    assert_same_bits(sums.cpu()[:-1], torch.tensor(expected, dtype=torch.float64)[:-1], "sums")
    assert not sums[-1, 0].isfinite()


def test_large_arrays():
    numel = 2**26 + 5
    arrays = make_arrays(numel, torch.bfloat16, torch.bfloat16, in_place=True, seed=3, wild=False)
    device = to_device(arrays.grad)
    partials = torch.zeros(-(-numel // _C.optim.SQUARES_BLOCK), dtype=torch.float64, device="cuda")
    _C.optim.cuda_sum_squares(address(device), DTYPES[torch.bfloat16], numel, address(partials), stream())
    assert_same_bits(partials.cpu(), sum_squares(_C.optim.isa(), arrays.grad, 2), "partials")
    host, on_device = arrays.clone(), arrays.clone("cuda")
    run_adam(_C.optim.isa(), host, SCALARS["adamw"], num_threads=2)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    _C.optim.cuda_update(on_device.range(), AdamScalars(**SCALARS["adamw"]), stream())
    end.record()
    end.synchronize()
    for name, tensor in on_device.outputs().items():
        assert_same_bits(tensor.cpu(), host.outputs()[name], name)
    milliseconds = begin.elapsed_time(end)
    gparams = numel / milliseconds / 1e6
    print(f"cuda_adam, first run: {gparams:.1f} Gparam/s, {28 * gparams:.0f} GB/s")


def update_on_device(update, misalign):
    result = update.copy(misalign)
    for state in (result.master, result.momentum, result.variance):
        state.data = to_device(state.data, misalign)
        state.scales = None if state.scales is None else state.scales.cuda()
    result.grad, result.param = to_device(result.grad, misalign), to_device(result.param, misalign)
    return result


def on_host(memory):
    return [tuple(t.cpu() for t in item) if isinstance(item, tuple) else item.cpu() for item in memory]


@pytest.mark.parametrize("misalign", [0, 3])
@pytest.mark.parametrize(("moments", "master", "grad_dtype", "param_dtype"), CASES, ids=str)
def test_adam_with_states_of_fewer_bytes(moments, master, grad_dtype, param_dtype, misalign):
    for numel in SIZES:
        for scalars in ("adamw", "adam_l2"):
            host = Update.random(numel, MOMENTS[moments], master, grad_dtype, param_dtype, seed=numel)
            device = update_on_device(host, misalign)
            for _ in range(2):
                host.run("scalar", SCALARS[scalars])
                _C.optim.cuda_update(device.range(), AdamScalars(**SCALARS[scalars]), stream())
            assert_same_bits(on_host(device.memory()), host.memory(), f"cuda, {numel} elements")


@pytest.mark.parametrize("rule", one_moment.SCALARS, ids=str)
@pytest.mark.parametrize("momentum", one_moment.MOMENTA, ids=str)
@pytest.mark.parametrize("master", one_moment.MASTERS, ids=str)
@pytest.mark.parametrize("misalign", [0, 3])
def test_optimizers_of_one_moment(rule, momentum, master, misalign):
    wild = momentum == master == _C.StateType.FLOAT32
    for numel in SIZES:
        host = one_moment.Update.random(numel, momentum, master, wild=wild)
        device = host.copy()
        device.grad, device.param = to_device(host.grad, misalign), to_device(host.param, misalign)
        for state in (device.master, device.momentum):
            state.data = to_device(state.data, misalign)
            state.scales = None if state.scales is None else state.scales.cuda()
        for _ in range(2):
            host.run("scalar", rule)
            _C.optim.cuda_update(device.range(), MomentumScalars(rule, **one_moment.SCALARS[rule]), stream())
        assert_same_bits(on_host(device.memory()), host.memory(), f"cuda, {numel} elements")


@pytest.mark.parametrize("kind", [_C.StateType.BFLOAT16, _C.StateType.SIGNED8, _C.StateType.UNSIGNED8], ids=str)
def test_states_of_fewer_bytes_and_back(kind):
    values = random_values(70_001, torch.float32, torch.Generator().manual_seed(5), wild=False)
    values[300], values[600], values[1024:1280] = float("nan"), float("inf"), 1e-40
    expected, device, source = State.of(kind, values), State.empty(kind, len(values)), values.cuda()
    device.data = device.data.cuda()
    device.scales = None if device.scales is None else device.scales.cuda()
    scales = 0 if device.scales is None else address(device.scales)
    _C.optim.cuda_compress_state(address(source), kind, address(device.data), scales, len(values), stream(), key=KEY)
    assert_same_bits(on_host([device.memory]), [expected.memory], "compressed")
    _C.optim.cuda_expand_state(kind, address(device.data), scales, address(source), len(values), stream())
    assert_same_bits(source.cpu(), expected.expanded(), "expanded")

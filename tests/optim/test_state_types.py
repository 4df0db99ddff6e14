import dataclasses
import functools
import math
import zlib

import numpy
import pytest
import torch

from patrickstar import _C
from tests.bits import assert_same_bits
from tests.optim.kernel_calls import (
    DTYPES,
    ISAS,
    AdamScalars,
    adam_scalars,
    address,
    check_other_passes,
    make_arrays,
    random_values,
    run_adam,
)

StateType = _C.StateType
BLOCK = _C.optim.STATE_BLOCK
KEY = _C.optim.random_key(seed=7, step=3, param=11, first=5)
SCALARS = {
    "adamw": adam_scalars(3, weight_decay=0.1, grad_scale=0.37),
    "adam_l2": adam_scalars(1, lr=0.3, weight_decay=0.1, decoupled=False),
    "fine_tuning": adam_scalars(50, lr=1e-4, weight_decay=0.1, grad_scale=0.37),
}
SIZES = [0, 1, 17, 256, 257, 1000]
EIGHT_BITS = {"signed": StateType.SIGNED8, "unsigned": StateType.UNSIGNED8}
MOMENTS = {
    "bf16": (StateType.BFLOAT16, StateType.BFLOAT16),
    "8bit": (StateType.SIGNED8, StateType.UNSIGNED8),
    "float32_and_8bit": (StateType.FLOAT32, StateType.UNSIGNED8),
    "8bit_and_float32": (StateType.SIGNED8, StateType.FLOAT32),
}
FLOATS = (StateType.FLOAT32, StateType.FLOAT32)


@dataclasses.dataclass
class State:
    """An array of one type, ``misalign`` elements (of float32 or 16 bits) into its memory."""

    type: StateType
    data: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def empty(cls, kind, numel, misalign=0):
        dtype = {StateType.FLOAT32: torch.float32, StateType.BFLOAT16: torch.bfloat16,
                 StateType.LOWER_HALF: torch.int16}.get(kind, torch.uint8)  # fmt: skip
        data = torch.full((numel + misalign,), 7, dtype=dtype)[misalign:]
        scales = torch.full((-(-numel // BLOCK),), 7.0) if kind in EIGHT_BITS.values() else None
        return cls(kind, data, scales)

    @property
    def array(self):
        return _C.optim.StateArray(address(self.data), self.type, 0 if self.scales is None else address(self.scales))

    @property
    def memory(self):
        return self.data if self.scales is None else (self.data, self.scales)

    def copy(self, misalign=0):
        other = State.empty(self.type, len(self.data), misalign)
        other.data.copy_(self.data)
        if self.scales is not None:
            other.scales.copy_(self.scales)
        return other

    def expanded(self, isa="scalar"):
        out = torch.empty(len(self.data))
        _C.optim.expand_state(isa, self.array, address(out), len(out))
        return out

    @classmethod
    def of(cls, kind, values, isa="scalar", key=KEY):
        state = cls.empty(kind, len(values))
        _C.optim.compress_state(isa, address(values), state.array, len(values), key=key)
        return state


def published_map(*, signed):
    """create_dynamic_map of bitsandbytes (functional.py), for 7 exponent bits and 8 bits in all; sorted."""
    data = []
    for i in range(7):
        boundaries = torch.linspace(0.1, 1, 2**i + 1 if signed else 2 ** (i + 1) + 1)
        means = (boundaries[:-1] + boundaries[1:]) / 2.0
        data += (10 ** (-6 + i) * means).tolist()
        if signed:
            data += (-(10 ** (-6 + i)) * means).tolist()
    return torch.tensor(sorted([*data, 0.0, 1.0]))


def code_order(*, signed):
    """The codes in the order of their values: in our signed map the byte of zero is zero."""
    return (torch.arange(256) + (129 if signed else 0)).to(torch.uint8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_the_map_is_the_published_one(isa, kind):
    signed = kind == "signed"
    state = State(EIGHT_BITS[kind], code_order(signed=signed), torch.ones(1))
    values, published = state.expanded(isa), published_map(signed=signed)
    assert len(published) == 256
    torch.testing.assert_close(values, published, rtol=2e-6, atol=0)
    assert values[-1] == 1 and values[127 if signed else 0] == 0
    assert_same_bits(values, state.expanded("scalar"))
    state.scales.fill_(0.3)
    assert_same_bits(state.expanded(isa), values * torch.tensor(0.3))


def blocks_of(values, scale=1.0):
    rows = torch.nn.functional.pad(values, (0, -len(values) % (BLOCK - 1))).view(-1, BLOCK - 1)
    return torch.cat([rows, torch.full((len(rows), 1), scale)], 1).flatten()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_codes_are_those_of_the_nearest_entries(isa, kind):
    signed = kind == "signed"
    entries = published_map(signed=signed).double()
    middles = ((entries[1:] + entries[:-1]) / 2).float()
    generator = torch.Generator().manual_seed(0)
    sizes = 10 ** (torch.rand(20_000, generator=generator) * 9 - 9)
    signs = torch.randint(2, sizes.shape, generator=generator) * 2 - 1
    steps = torch.tensor([-4e-6, -3e-6, 0.0, 3e-6, 4e-6])
    around = (middles[:, None] * (1 + steps)).flatten()
    for scale in (1.0, 2.0**-20, 3e38, 1e-30):
        values = blocks_of(torch.cat([entries.float(), around, sizes * signs if signed else sizes]), 1.0) * scale
        codes = State.of(EIGHT_BITS[kind], values, isa)
        scaled = values.double() / scale
        index = torch.searchsorted(middles.double(), scaled)
        if not signed:
            index[(scaled > 0) & (index == 0)] = 1
        places = torch.empty(256, dtype=torch.int64)
        places[code_order(signed=signed).long()] = torch.arange(256)
        actual = places[codes.data.long()]
        assert signed or ((actual == 0) == (values == 0)).all()
        farther = (entries[actual] - scaled).abs() - (entries[index] - scaled).abs()
        assert (farther <= 3e-6 * scaled.abs()).all()
        assert (actual != index).double().mean() < 1e-2
        assert_same_bits(codes.scales, torch.full_like(codes.scales, scale))
        assert_same_bits(codes.memory, State.of(EIGHT_BITS[kind], values, "scalar").memory, isa)


def edges(*, signed):
    """Floats around entries, midpoints between entries (sections start at some), and the least distinct ones."""
    entries = State(EIGHT_BITS["signed" if signed else "unsigned"], code_order(signed=signed), torch.ones(1)).expanded()
    middles = ((entries[1:].double() + entries[:-1].double()) / 2).float()
    least = torch.tensor([0.0, 2.0**-149, 2.0**-126, 1e-30, 1e-12, 2.0**-24, 0.325e-6])
    magnitudes = torch.cat([entries, middles, least]).abs().unique()
    bits = magnitudes.view(torch.int32)[:, None] + torch.arange(-4, 5, dtype=torch.int32)
    near = bits.clamp(0, 0x3F800000).flatten().view(torch.float32).unique()
    return torch.cat([near, -near]) if signed else near


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "expected"), [("signed", (4864, 3165205878)), ("unsigned", (4864, 2262988424))])
def test_codes_at_edges_stay_what_they_were(isa, kind, expected):
    """The checksum is that of the first version's codes."""
    values = blocks_of(edges(signed=kind == "signed"))
    codes = State.of(EIGHT_BITS[kind], values, isa).data
    assert (len(codes), zlib.crc32(codes.numpy().tobytes())) == expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_blocks_without_ordinary_scale(isa, kind):
    values = torch.rand(7 * BLOCK - 9, generator=torch.Generator().manual_seed(1))
    for block, value in enumerate([0.0, math.nan, math.inf, -math.inf, 7e-31, 1.0]):
        if value in (0.0, 7e-31):
            values[block * BLOCK : (block + 1) * BLOCK] = value
        values[block * BLOCK + 17] = value
    state = State.of(EIGHT_BITS[kind], values, isa)
    expanded = torch.nn.functional.pad(state.expanded(isa), (0, 9)).view(7, BLOCK)
    assert (expanded[[0, 4]] == 0).all() and not torch.signbit(expanded[[0, 4]]).any()
    assert expanded[1:4].isnan().all(), "no NaN or infinity may be lost"
    assert expanded[5:].isfinite().all()
    assert_same_bits(state.memory, State.of(EIGHT_BITS[kind], values, "scalar").memory)
    empty = State(EIGHT_BITS[kind], torch.zeros(BLOCK, dtype=torch.uint8), torch.zeros(1))
    assert_same_bits(empty.expanded(isa), torch.zeros(BLOCK))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", EIGHT_BITS)
def test_what_was_expanded_is_compressed_to_the_same(isa, kind):
    generator = torch.Generator().manual_seed(2)
    sizes = 10 ** (torch.rand(64, BLOCK, generator=generator) * 12 - 9)
    values = sizes * (torch.randint(2, sizes.shape, generator=generator) * 2 - 1 if kind == "signed" else 1)
    state = State.of(EIGHT_BITS[kind], values.flatten(), isa)
    expanded = state.expanded(isa)
    assert_same_bits(State.of(EIGHT_BITS[kind], expanded, isa).memory, state.memory)
    largest = values.abs().argmax(1, keepdim=True)
    assert_same_bits(expanded.view(64, BLOCK).gather(1, largest), values.gather(1, largest))
    if kind == "signed":
        assert (state.scales < 0).any() and (state.scales > 0).any()
    both = State.of(EIGHT_BITS["signed"], torch.tensor([-2.0, 2.0]), isa)
    assert both.scales.tolist() == [2.0]


def mixed(counter, key):
    """A hash of Chris Wellons' hash-prospector, with a key before each of its two multiplications."""
    x = numpy.asarray(counter, dtype=numpy.uint32) + numpy.uint32(key.a)
    x = (x ^ (x >> numpy.uint32(16))) * numpy.uint32(0x21F0AAAD)
    x ^= x >> numpy.uint32(15)
    x = (x + numpy.uint32(key.b)) * numpy.uint32(0xD35A2D97)
    return x ^ (x >> numpy.uint32(15))


def random_bits(key, numel, first_counter):
    elements = key.first + numpy.arange(numel)
    words = mixed((elements // 2 + first_counter) % 2**32, key)
    return numpy.where(elements % 2 == 0, words & numpy.uint32(0xFFFF), words >> numpy.uint32(16))


def rounded_to_bf16(values, random):
    x = torch.where(values.isnan(), torch.tensor(math.nan), values).numpy().view(numpy.uint32)
    return torch.from_numpy(((x + random.astype(numpy.uint32)) >> numpy.uint32(16)).astype(numpy.uint16)).view(
        torch.bfloat16
    )


def momentum_bits(key, numel):
    return random_bits(key, numel, 0)


def variance_bits(key, numel):
    return random_bits(key, numel, 0x9E3779B9)


def param_bits(key, numel):
    return random_bits(key, numel, 2 * 0x9E3779B9)


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_is_rounded_with_the_keys_bits(isa):
    values = random_values(70_001, torch.float32, torch.Generator().manual_seed(2), wild=True)
    for key in (KEY, _C.optim.RandomKey(1, 2, 2**32 - 3)):
        state = State.of(StateType.BFLOAT16, values, isa, key)
        assert_same_bits(state.data, rounded_to_bf16(values, momentum_bits(key, len(values))), isa)
        assert_same_bits(state.expanded(isa), state.data.float())
    assert state.data[values.isnan()].isnan().all()
    infinite = values.isinf()
    assert infinite.any() and torch.equal(state.data[infinite].float(), values[infinite])


ROUNDINGS = {"momentum": momentum_bits, "variance": variance_bits, "param": param_bits}
DRAWS = 2**17


def keys_by(name, count):
    return [_C.optim.random_key(1, *((i, 2) if name == "steps" else (3, i)), 0) for i in range(count)]


@functools.cache
def draws(bits_of):
    """16 bits each of elements of one range, and of four elements (two pairs) in many steps and in many parameters."""
    result = {"elements": bits_of(KEY, DRAWS)}
    for name in ("steps", "params"):
        result[name] = numpy.concatenate([bits_of(key, 4) for key in keys_by(name, DRAWS // 4)])
    return {name: values.astype(numpy.int64) for name, values in result.items()}


def check_uniform(counts, what):
    """Chi-square, within five standard deviations."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    chi_square = ((counts - expected) ** 2).sum() / expected
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5, f"{what}: chi-square {chi_square} of {freedom}"


def check_independent(one, other, what):
    """Checks linear correlation, correlation of each pair of bits, and that pairs of the highest and lowest bits are
    uniform.
    """
    limit = 5 / len(one) ** 0.5
    assert abs(numpy.corrcoef(one, other)[0, 1]) < limit, what
    bits = [(x[:, None] >> numpy.arange(16) & 1).astype(numpy.float32) - 0.5 for x in (one, other)]
    assert abs(4 * bits[0].T @ bits[1] / len(one)).max() < 1.2 * limit, f"{what}: bits"  # the largest of 256
    for shift in (0, 12):
        pairs = (one >> shift & 15) * 16 + (other >> shift & 15)
        check_uniform(numpy.bincount(pairs, minlength=256), f"{what}: pairs")


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rounding_has_no_bias(rounding):
    for name, values in draws(ROUNDINGS[rounding]).items():
        for element in range(4) if name != "elements" else (slice(None),):
            rows = values.reshape(-1, 4)[:, element].ravel()
            error = 5 * 12**-0.5 / len(rows) ** 0.5
            share = rows / 2**16
            assert abs(share.mean() - (0.5 - 2**-17)) < error, name
            assert abs(((share - 0.5) ** 2).mean() - 1 / 12) < error, name
    x = torch.full((DRAWS,), 1 + 0.3 / 128)
    mean = rounded_to_bf16(x, ROUNDINGS[rounding](KEY, len(x))).double().mean().item()
    assert abs(mean - x[0].item()) < 5 * 0.46 / 128 / len(x) ** 0.5


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_random_bits_are_uniform(rounding):
    for name, values in draws(ROUNDINGS[rounding]).items():
        check_uniform(numpy.bincount(values, minlength=2**16), name)
        check_uniform(numpy.bincount(values >> 8, minlength=256), f"{name}: upper bits")
        check_uniform(numpy.bincount(values & 255, minlength=256), f"{name}: lower bits")


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_neighbours_bits_are_independent(rounding):
    values = draws(ROUNDINGS[rounding])
    elements = values["elements"]
    for lag in (1, 2, 3, 16, 32, 256, DRAWS // 2):
        check_independent(elements[lag:], elements[:-lag], f"elements, lag {lag}")
    check_independent(elements[::2], elements[1::2], "of one hash")
    for name in ("steps", "params"):
        for lag in (1, 2, 7):
            check_independent(values[name][4 * lag :], values[name][: -4 * lag], f"{name}, lag {lag}")


def test_roundings_of_one_element_are_independent():
    by_rounding = [draws(bits_of) for bits_of in ROUNDINGS.values()]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        for name in by_rounding[0]:
            check_independent(by_rounding[one][name], by_rounding[other][name], f"{name}, {one} and {other}")


@pytest.mark.parametrize("isa", ISAS)
def test_bits_follow_from_the_element_alone(isa):
    values = torch.rand(1000, generator=torch.Generator().manual_seed(4))
    whole = State.of(StateType.BFLOAT16, values, isa, _C.optim.random_key(7, 3, 11, 0)).data
    for first in (1, 2, 7, 255, 300):
        part = State.of(StateType.BFLOAT16, values[first:].clone(), isa, _C.optim.random_key(7, 3, 11, first)).data
        assert_same_bits(part, whole[first:], f"from element {first}")


def test_keys_are_of_splitmix64():
    def mix(x):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> shift)) * factor % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    assert mix(golden) == 0xE220A8397B1DCDAF, "the generator's first output for seed 0, by its published code"
    for seed, step, param in ((0, 0, 0), (7, 3, 11), (2**64 - 1, 10**6, 10**5)):
        x = mix(mix((mix((seed + golden) % 2**64) + golden * (step + 1)) % 2**64) + golden * (param + 1) & 2**64 - 1)
        key = _C.optim.random_key(seed, step, param, 9)
        assert (key.a, key.b, key.first) == (x % 2**32, x >> 32, 9)


@dataclasses.dataclass
class Update:
    master: State
    momentum: State
    variance: State
    grad: torch.Tensor
    param: torch.Tensor

    @classmethod
    def random(cls, numel, moments, master, grad_dtype, param_dtype, seed=0):
        arrays = make_arrays(numel, grad_dtype, param_dtype, in_place=False, seed=seed, wild=False)
        sizes = 10 ** (torch.rand(numel, generator=torch.Generator().manual_seed(seed)) * 4 - 4)
        momentum = State.of(moments[0], arrays.momentum * sizes)
        variance = State.of(moments[1], arrays.variance * sizes.square())
        arrays.master[::3] = arrays.master[::3].bfloat16().float() * (1 + 2**-8)  # many ties
        whole = State(StateType.FLOAT32, arrays.master)
        result = cls(whole, momentum, variance, arrays.grad, arrays.param)
        if master == StateType.LOWER_HALF:
            sign = address(variance.data) if moments[1] == StateType.FLOAT32 else 0
            lower = State.empty(master, numel)
            _C.optim.split_master(
                "scalar", address(whole.data), address(arrays.param), address(lower.data), sign, numel
            )
            result.master = lower
        elif master == StateType.NONE:
            result.param.copy_(arrays.master)
            result.master = State.empty(master, 0)
        return result

    def copy(self, misalign=0):
        def aside(tensor):
            memory = torch.empty(len(tensor) + misalign, dtype=tensor.dtype)[misalign:]
            return memory.copy_(tensor)

        states = (state.copy(misalign) for state in (self.master, self.momentum, self.variance))
        return Update(*states, aside(self.grad), aside(self.param))

    def memory(self):
        return [self.master.memory, self.momentum.memory, self.variance.memory, self.param]

    def states(self):
        return [self.master.array, self.momentum.array, self.variance.array]

    def range(self, *, with_param=True, key=KEY, **options):
        arrays = (*self.states(), address(self.grad), DTYPES[self.grad.dtype], address(self.param) if with_param else 0)
        return _C.optim.AdamRange(*arrays, DTYPES[self.param.dtype], len(self.grad), key=key, **options)

    def run(self, isa, scalars, num_threads=2, key=KEY):
        _C.optim.update(isa, self.range(key=key), AdamScalars(**scalars), num_threads)

    def whole_master(self):
        if self.master.type == StateType.NONE:
            return self.param.float()
        if self.master.type == StateType.FLOAT32:
            return self.master.data.clone()
        sign = address(self.variance.data) if self.variance.type == StateType.FLOAT32 else 0
        master = torch.empty(len(self.param))
        _C.optim.join_master(
            "scalar", address(self.param), address(self.master.data), sign, address(master), len(master)
        )
        return master


def half_away(master):
    x = master.numpy().view(numpy.uint32)
    return torch.from_numpy(((x + numpy.uint32(0x8000)) >> numpy.uint32(16)).astype(numpy.uint16)).view(torch.bfloat16)


def expected_update(update, scalars, key=KEY):
    numel = len(update.grad)
    floats = make_arrays(numel, update.grad.dtype, update.param.dtype, in_place=False, seed=0, wild=False)
    floats.master, floats.grad = update.whole_master(), update.grad
    floats.momentum, floats.variance = update.momentum.expanded(), update.variance.expanded().abs()
    run_adam("scalar", floats, scalars)
    result = update.copy()
    for state, values, bits_of in (
        (result.momentum, floats.momentum, momentum_bits),
        (result.variance, floats.variance, variance_bits),
    ):
        if state.type == StateType.BFLOAT16:
            state.data.copy_(rounded_to_bf16(values, bits_of(key, numel)))
        else:
            state.data, state.scales = (new := State.of(state.type, values)).data, new.scales
    result.param.copy_(floats.param)
    if update.master.type == StateType.FLOAT32:
        result.master.data = floats.master
    elif update.master.type == StateType.NONE:
        result.param.copy_(rounded_to_bf16(floats.master, param_bits(key, numel)))
    elif update.variance.type == StateType.FLOAT32:
        sign = address(result.variance.data)
        lower, param = address(result.master.data), address(result.param)
        _C.optim.split_master("scalar", address(floats.master), param, lower, sign, numel)
    else:
        result.param.copy_(half_away(floats.master))
        result.master.data.copy_(floats.master.view(torch.int16)[::2])
        assert_same_bits(result.whole_master(), floats.master, "what is split is whole")
    return result


CASES = [
    *((moments, StateType.FLOAT32, grad, param) for moments in MOMENTS for grad, param in
      ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16))),
    *((moments, master, torch.bfloat16, torch.bfloat16) for moments in MOMENTS for master in
      (StateType.LOWER_HALF, StateType.NONE)),
]  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("moments", "master", "grad_dtype", "param_dtype"), CASES, ids=str)
def test_adam(isa, moments, master, grad_dtype, param_dtype):
    for numel in SIZES:
        for misalign, scalars in ((0, "adamw"), (5, "adam_l2")):
            initial = Update.random(numel, MOMENTS[moments], master, grad_dtype, param_dtype, seed=numel)
            update = initial.copy(misalign)
            for _ in range(2):
                expected = expected_update(update, SCALARS[scalars])
                update.run(isa, SCALARS[scalars])
                assert_same_bits(update.memory(), expected.memory(), f"{isa}, {numel} elements")
            assert_same_bits(update.grad, initial.grad, "only read")


@pytest.mark.parametrize("isa", ISAS)
def test_a_bare_parameter_with_float32_moments(isa):
    update = Update.random(1000, FLOATS, StateType.NONE, torch.float16, torch.bfloat16)
    expected = expected_update(update, SCALARS["adamw"])
    update.run(isa, SCALARS["adamw"])
    assert_same_bits(update.memory(), expected.memory())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("numel", [257, 70_001])
def test_the_other_passes(isa, moments, numel):
    dtypes = (torch.bfloat16, torch.bfloat16)
    initial = Update.random(numel, MOMENTS[moments], StateType.FLOAT32, *dtypes, seed=9)
    scalars = SCALARS["fine_tuning"]
    check_other_passes(isa, AdamScalars, initial, expected_update(initial, scalars), scalars, numel / 2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_where_a_range_is_cut_changes_nothing(isa, moments):
    whole = Update.random(2000, MOMENTS[moments], StateType.NONE, torch.float32, torch.bfloat16)
    parts, other = whole.copy(), whole.copy()
    whole.run(isa, SCALARS["adamw"])
    begin = 0
    for end in (1, 700, 701, 2000) if moments == "bf16" else (256, 1024, 2000):
        states = [State(state.type, state.data[begin:end],
                        None if state.scales is None else state.scales[begin // BLOCK : -(-end // BLOCK)])
                  for state in (parts.momentum, parts.variance)]  # fmt: skip
        part = Update(parts.master, *states, parts.grad[begin:end], parts.param[begin:end])
        part.run(isa, SCALARS["adamw"], key=_C.optim.RandomKey(KEY.a, KEY.b, KEY.first + begin))
        begin = end
    assert_same_bits(parts.memory(), whole.memory())
    other.run(isa, SCALARS["adamw"], key=_C.optim.random_key(7, 4, 11, 5))
    assert (other.param != whole.param).float().mean() > 0.2, "another step rounds otherwise"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("moments", MOMENTS)
def test_nothing_outside_the_range_is_written(isa, moments):
    memory = Update.random(1024, MOMENTS[moments], StateType.FLOAT32, torch.bfloat16, torch.bfloat16)
    before = memory.copy()
    scales = [None if state.scales is None else state.scales[1:3] for state in (memory.momentum, memory.variance)]
    inner = Update(
        State(StateType.FLOAT32, memory.master.data[256:700]),
        State(memory.momentum.type, memory.momentum.data[256:700], scales[0]),
        State(memory.variance.type, memory.variance.data[256:700], scales[1]),
        memory.grad[256:700], memory.param[256:700],
    )  # fmt: skip
    inner.run(isa, SCALARS["adamw"])
    for name in ("master", "momentum", "variance"):
        ours, theirs = getattr(memory, name), getattr(before, name)
        for part in (slice(0, 256), slice(700, None)):
            assert_same_bits(ours.data[part], theirs.data[part], name)
        if ours.scales is not None:
            assert_same_bits(ours.scales[[0, 3]], theirs.scales[[0, 3]], f"{name}'s scales")
    for part in (slice(0, 256), slice(700, None)):
        assert_same_bits(memory.param[part], before.param[part], "param")


def published_step(param, grad, codes, step, *, lr, betas, eps, least_variance=0):
    """8-bit Adam as bitsandbytes computes it (kernels.cu, kOptimizerStatic8bit2StateBlockwise), in plain torch;
    ``least_variance``: the least code of a positive variance.
    """
    moments = []
    for (indices, scales), table in zip(codes, (published_map(signed=True), published_map(signed=False)), strict=True):
        moments.append((table[indices] * scales[:, None]).flatten())
    m = betas[0] * moments[0] + (1 - betas[0]) * grad
    v = betas[1] * moments[1] + (1 - betas[1]) * grad * grad
    size = lr / (1 - betas[0] ** step)
    param = param - size * m / (v.sqrt() / math.sqrt(1 - betas[1] ** step) + eps)
    new = []
    for values, signed in ((m, True), (v, False)):
        rows = values.view(-1, BLOCK)
        scales = rows.abs().amax(1)
        table = published_map(signed=signed)
        indices = torch.searchsorted((table[1:] + table[:-1]) / 2, rows / scales[:, None])
        new.append((indices if signed else torch.where(rows > 0, indices.clamp_min(least_variance), indices), scales))
    return param, new


def test_a_hundred_steps_of_8_bit_adam():
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    numel = 16 * BLOCK
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(numel, generator=generator) * 0.1
    size = 10 ** (torch.rand(numel, generator=generator) * 3 - 3)
    update = Update.random(numel, MOMENTS["8bit"], StateType.FLOAT32, torch.float32, torch.float32)
    zeros = torch.zeros(numel)
    update.master.data.copy_(start)
    update.momentum, update.variance = (State.of(kind, zeros) for kind in MOMENTS["8bit"])
    reference = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([reference], **options)
    published, kept = start.clone(), start.clone()
    codes = kept_codes = [(torch.full((16, BLOCK), zero), torch.ones(16)) for zero in (127, 0)]
    for step in range(1, 101):
        grad = (torch.randn(numel, generator=generator) + 0.3) * size
        reference.grad = grad
        optimizer.step()
        published, codes = published_step(published, grad, codes, step, **options)
        kept, kept_codes = published_step(kept, grad, kept_codes, step, **options, least_variance=1)
        update.grad.copy_(grad)
        update.run(ISAS[-1], adam_scalars(step, **options))
    moved = (reference.detach() - start).norm()
    ours, theirs = ((x - reference.detach()).norm() / moved for x in (update.master.data, published))
    apart = (update.master.data - kept).norm() / moved
    print(f"relative error of 100 steps: ours {ours:.4f}, published {theirs:.4f}, apart {apart:.4f}")
    assert ours < 0.2
    assert ours < 0.5 * theirs
    assert apart < 0.1 * ours


def test_wrong_states_are_refused():
    update = Update.random(300, MOMENTS["8bit"], StateType.FLOAT32, torch.bfloat16, torch.bfloat16)
    update.variance.type = StateType.SIGNED8
    with pytest.raises(ValueError, match="variance cannot be of this StateType"):
        update.run("scalar", SCALARS["adamw"])
    update.variance.type = StateType.UNSIGNED8
    scales, update.variance.scales = update.variance.scales, None
    with pytest.raises(ValueError, match="variance has no scales"):
        update.run("scalar", SCALARS["adamw"])
    update.variance.scales = scales
    update.master = State.empty(StateType.NONE, 0)
    with pytest.raises(ValueError, match="float32 master"):
        _C.optim.update_param("scalar", update.range(), AdamScalars(**SCALARS["adamw"]), 1)
    with pytest.raises(ValueError, match="param must be bfloat16"):
        update.range(with_param=False)

import pytest
import torch

from patrickstar import _C
from tests.bits import assert_same_bits
from tests.optim.kernel_calls import DTYPES, ISAS, adam_scalars, address, cast_from_float, make_arrays, run_adam
from tests.optim.test_state_types import State, Update

FLOAT32 = _C.StateType.FLOAT32
SCALARS = {
    "adamw": adam_scalars(3, weight_decay=0.1, grad_scale=0.37),
    "adam_l2": adam_scalars(1, lr=0.3, weight_decay=0.1, decoupled=False),
    "nothing": adam_scalars(5, lr=0.0),
}
SIZES = [0, 1, 15, 17, 128, 257, 289, 4097, 70_001]


def split(isa, master, variance):
    param, lower = torch.empty(len(master), dtype=torch.bfloat16), torch.empty(len(master), dtype=torch.int16)
    variance = variance.clone()
    _C.optim.split_master(isa, address(master), address(param), address(lower), address(variance), len(master))
    return param, lower, variance


def join(isa, param, lower, variance):
    master = torch.empty(len(param))
    _C.optim.join_master(isa, address(param), address(lower), address(variance), address(master), len(param))
    return master


def edge_values():
    """All upper halves, with lower halves around the points where rounding changes its direction."""
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return ((torch.arange(2**16)[:, None] << 16) + lower).flatten().to(torch.uint32).view(torch.float32)


def random_bits():
    return (
        torch.randint(-(2**31), 2**31, (1_000_003,), generator=torch.Generator().manual_seed(0))
        .int()
        .view(torch.float32)
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("values", [edge_values, random_bits])
def test_every_master_comes_back(isa, values):
    master = values()
    variance = torch.rand(len(master), generator=torch.Generator().manual_seed(1))
    param, lower, signed = split(isa, master, variance)
    canonical = torch.where(master.isnan(), torch.tensor(float("nan")), master)
    assert_same_bits(param, cast_from_float(isa, master, torch.bfloat16))
    assert_same_bits(param[~master.isnan()], master[~master.isnan()].to(torch.bfloat16))
    assert_same_bits(join(isa, param, lower, signed), canonical)
    assert_same_bits(signed.abs(), variance)
    halfway = int(torch.signbit(signed).sum())
    assert 0 < halfway < len(master) / 6
    # A new split ignores the old signs.
    assert_same_bits(split(isa, master, signed), (param, lower, signed))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scalars", SCALARS)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_adam_gives_the_bits_of_a_whole_master(isa, scalars, grad_dtype):
    for numel in SIZES:
        for misalign, wild in ((0, True), (5, False)):
            whole = make_arrays(numel, grad_dtype, torch.bfloat16, in_place=False, seed=numel, wild=wild)
            whole.variance = whole.variance.abs()
            whole.master[::3] = edge_values()[torch.arange(0, numel, 3) * 5 % (6 * 2**16)]  # half of all are ties
            memory = [torch.empty(numel + misalign, dtype=t.dtype) for t in split(isa, whole.master, whole.variance)]
            param, lower, variance = (tensor[misalign:] for tensor in memory)
            for tensor, value in zip((param, lower, variance), split(isa, whole.master, whole.variance), strict=True):
                tensor.copy_(value)
            momentum = whole.momentum.clone()
            states = (State(FLOAT32, momentum), State(FLOAT32, variance))
            update = Update(State(_C.StateType.LOWER_HALF, lower), *states, whole.grad, param)
            for _ in range(3):
                run_adam("scalar", whole, SCALARS[scalars])
                update.run(isa, SCALARS[scalars])
                master = join(isa, param, lower, variance)
                assert_same_bits(
                    (param, master, momentum, variance.abs()),
                    (whole.param, whole.master, whole.momentum, whole.variance),
                    f"{isa}, {numel} elements",
                )

import dataclasses
from functools import partial

import pytest
import torch

from patrickstar import _C
from tests.bits import assert_same_bits
from tests.optim.kernel_calls import (
    DTYPES,
    ISAS,
    MomentumScalars,
    adam_scalars,
    address,
    check_other_passes,
    make_arrays,
    run_adam,
)
from tests.optim.test_state_types import KEY, State, half_away, momentum_bits, param_bits, rounded_to_bf16

StateType = _C.StateType
Rule = _C.MomentumRule
SIZES = [0, 1, 17, 256, 257, 1000]
MOMENTA = [StateType.FLOAT32, StateType.BFLOAT16, StateType.SIGNED8]
MASTERS = [StateType.FLOAT32, StateType.LOWER_HALF, StateType.NONE]
COMMON = {"grad_scale": 0.37, "weight_decay": 0.0, "decay": 1.0, "step_size": 0.05}
SGD = {**COMMON, "weight_decay": 0.1, "momentum_factor": 0.9, "one_minus_dampening": 1.0}
SCALARS = {
    Rule.LION: {**COMMON, "decay": 1 - 0.05 * 0.1, "one_minus_beta1": 0.1, "one_minus_beta2": 0.01},
    Rule.SGD: SGD,
    Rule.NESTEROV: SGD,
}


@dataclasses.dataclass
class Update:
    master: State
    momentum: State
    grad: torch.Tensor
    param: torch.Tensor

    @classmethod
    def random(cls, numel, momentum, master, grad_dtype=torch.bfloat16, param_dtype=torch.bfloat16, wild=False):
        arrays = make_arrays(numel, grad_dtype, param_dtype, in_place=False, seed=numel, wild=wild)
        result = cls(
            State(StateType.FLOAT32, arrays.master), State.of(momentum, arrays.momentum), arrays.grad, arrays.param
        )
        if master == StateType.LOWER_HALF:
            result.master = State.empty(master, numel)
            halves = address(arrays.param), address(result.master.data)
            _C.optim.split_master("scalar", address(arrays.master), *halves, 0, numel)
        elif master == StateType.NONE:
            result.param.copy_(arrays.master)
            result.master = State.empty(master, 0)
        return result

    def copy(self, misalign=0):
        def aside(tensor):
            return torch.empty(len(tensor) + misalign, dtype=tensor.dtype)[misalign:].copy_(tensor)

        return Update(self.master.copy(misalign), self.momentum.copy(misalign), aside(self.grad), aside(self.param))

    def states(self):
        return [self.master.array, self.momentum.array, _C.optim.StateArray(0, StateType.NONE)]

    def range(self, *, with_param=True, **options):
        arrays = (*self.states(), address(self.grad), DTYPES[self.grad.dtype], address(self.param) if with_param else 0)
        return _C.optim.AdamRange(*arrays, DTYPES[self.param.dtype], len(self.grad), key=KEY, **options)

    def run(self, isa, rule, num_threads=2, **scalars):
        own = MomentumScalars(rule, **{**SCALARS[rule], **scalars})
        _C.optim.update(isa, self.range(), own, num_threads)

    def memory(self):
        return [self.master.memory, self.momentum.memory, self.param]

    def whole_master(self):
        if self.master.type == StateType.NONE:
            return self.param.float()
        if self.master.type == StateType.FLOAT32:
            return self.master.data.clone()
        master = torch.empty(len(self.param))
        halves = address(self.param), address(self.master.data)
        _C.optim.join_master("scalar", *halves, 0, address(master), len(master))
        return master


def lion(param, grads, *, lr, betas, weight_decay):
    """Algorithm 2 of Chen et al. 2023, line by line."""
    momentum = torch.zeros_like(param)
    for grad in grads:
        update = betas[0] * momentum + (1 - betas[0]) * grad
        momentum = betas[1] * momentum + (1 - betas[1]) * grad
        param = param - lr * (torch.sign(update) + weight_decay * param)
    return param


def torch_sgd(param, grads, **options):
    param = torch.nn.Parameter(param)
    optimizer = torch.optim.SGD([param], **options)
    for grad in grads:
        param.grad = grad
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rule", SCALARS, ids=str)
def test_ten_steps_against_others(isa, rule):
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(1000, generator=generator)
    grads = [torch.randn(1000, generator=generator) for _ in range(10)]
    update = Update.random(1000, StateType.FLOAT32, StateType.FLOAT32, torch.float32, torch.float32)
    update.master.data.copy_(start)
    update.momentum.data.zero_()
    for grad in grads:
        update.grad.copy_(grad)
        update.run(isa, rule)
    wide = [grad.double() * COMMON["grad_scale"] for grad in grads]
    if rule == Rule.LION:
        expected = lion(start.double(), wide, lr=0.05, betas=(0.9, 0.99), weight_decay=0.1)
    else:
        options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nesterov": rule == Rule.NESTEROV}
        expected = torch_sgd(start.double(), wide, **options)
    torch.testing.assert_close(update.master.data.double(), expected, rtol=1e-5, atol=1e-6)
    assert_same_bits(update.param, update.master.data)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch has no fma below AVX2")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dampening", "nesterov"), [(0.0, False), (0.3, False), (0.0, True)])
def test_ten_steps_with_the_bits_of_torch(isa, dampening, nesterov):
    generator = torch.Generator().manual_seed(2)
    param = torch.nn.Parameter(torch.randn(1000, generator=generator))
    options = {"lr": 0.05, "momentum": 0.9, "dampening": dampening, "weight_decay": 0.1, "nesterov": nesterov}
    theirs = torch.optim.SGD([param], **options)
    ours = Update.random(1000, StateType.FLOAT32, StateType.FLOAT32, torch.float32, torch.float32)
    ours.master.data.copy_(param.detach())
    ours.momentum.data.zero_()
    rule = Rule.NESTEROV if nesterov else Rule.SGD
    for step in range(10):
        param.grad = torch.randn(1000, generator=generator)
        theirs.step()
        ours.grad.copy_(param.grad)
        ours.run(isa, rule, grad_scale=1.0, one_minus_dampening=1 - dampening if step > 0 else 1.0)
        assert_same_bits(ours.master.data, param.detach(), f"step {step}")
        assert_same_bits(ours.momentum.data, theirs.state[param]["momentum_buffer"], f"step {step}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rule", SCALARS, ids=str)
@pytest.mark.parametrize("momentum", MOMENTA, ids=str)
@pytest.mark.parametrize("numel", [257, 70_001])
def test_the_other_passes(isa, rule, momentum, numel):
    scalars = {**SCALARS[rule], "step_size": 1e-4}
    initial = Update.random(numel, momentum, StateType.FLOAT32)
    expected = initial.copy()
    expected.run("scalar", rule, **scalars)
    check_other_passes(isa, partial(MomentumScalars, rule), initial, expected, scalars, numel / 8)


@pytest.mark.parametrize("rule", SCALARS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_settled_holds_for_every_scale_between(rule, dtype):
    initial = Update.random(5000, StateType.FLOAT32, StateType.FLOAT32, dtype, dtype, wild=True)
    for least, most in ((0.25, 1.5), (1e-3, 1e3)):
        update = initial.copy()
        logs = torch.zeros(1, _C.optim.OPEN_LOG_BYTES, dtype=torch.uint8)
        low = MomentumScalars(rule, **{**SCALARS[rule], "grad_scale": least})
        _C.optim.update_param_between(ISAS[-1], update.range(), low, 2, address(logs), most)
        for share in (0.0, 0.3, 1.0):
            scale = float(torch.tensor(least + share * (most - least)))
            exact = MomentumScalars(rule, **{**SCALARS[rule], "grad_scale": scale})
            expected, completed = initial.copy(), update.copy()
            _C.optim.update("scalar", expected.range(), exact, 2)
            _C.optim.update_param_scale_dependent(ISAS[-1], completed.range(), exact, 2, address(logs))
            assert_same_bits(completed.param, expected.param, f"scale {scale}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rule", SCALARS, ids=str)
@pytest.mark.parametrize("momentum", MOMENTA, ids=str)
@pytest.mark.parametrize("master", MASTERS, ids=str)
def test_states_of_fewer_bytes(isa, rule, momentum, master):
    for numel in SIZES:
        for misalign in (0, 5):
            initial = Update.random(numel, momentum, master)
            floats = initial.copy()
            floats.master = State(StateType.FLOAT32, initial.whole_master())
            floats.momentum = State(StateType.FLOAT32, initial.momentum.expanded())
            floats.run("scalar", rule)
            values = floats.master.data

            update = initial.copy(misalign)
            update.run(isa, rule)
            if momentum == StateType.BFLOAT16:
                bits = rounded_to_bf16(floats.momentum.data, momentum_bits(KEY, numel))
                assert_same_bits(update.momentum.data, bits, "momentum")
            else:
                assert_same_bits(update.momentum.memory, State.of(momentum, floats.momentum.data).memory, "momentum")
            if master == StateType.NONE:
                assert_same_bits(update.param, rounded_to_bf16(values, param_bits(KEY, numel)), "param")
            else:
                assert_same_bits(update.whole_master(), values, "master")
                rounded = values.bfloat16() if master == StateType.FLOAT32 else half_away(values)
                assert_same_bits(update.param, rounded, "param")
            assert_same_bits(update.grad, initial.grad, "only read")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rule", SCALARS, ids=str)
@pytest.mark.parametrize(("grad", "param"), [(torch.float32, torch.float16), (torch.float16, torch.float16)], ids=str)
def test_any_bits(isa, rule, grad, param):
    update = Update.random(70_001, StateType.FLOAT32, StateType.FLOAT32, grad, param, wild=True)
    expected = update.copy()
    update.run(isa, rule)
    expected.run("scalar", rule, num_threads=1)
    assert_same_bits(update.memory(), expected.memory())
    assert not update.master.data[~update.grad.isfinite()].isfinite().any()


def test_the_sign_of_zero_moves_nothing():
    update = Update.random(300, StateType.FLOAT32, StateType.FLOAT32)
    update.grad.zero_()
    update.momentum.data.zero_()
    before = update.master.data * torch.tensor(SCALARS[Rule.LION]["decay"])
    update.run(ISAS[-1], Rule.LION)
    assert_same_bits(update.master.data, before)


def test_wrong_arguments_are_refused():
    update = Update.random(300, StateType.SIGNED8, StateType.FLOAT32)
    update.momentum.type = StateType.UNSIGNED8
    with pytest.raises(ValueError, match="momentum cannot be of this StateType"):
        update.run("scalar", Rule.LION)
    update.momentum.type = StateType.SIGNED8
    scales, update.momentum.scales = update.momentum.scales, None
    with pytest.raises(ValueError, match="momentum has no scales"):
        update.run("scalar", Rule.SGD)
    update.momentum.scales = scales
    with pytest.raises(ValueError, match="variance cannot be of this StateType"):
        run_adam("scalar", update, adam_scalars(1))

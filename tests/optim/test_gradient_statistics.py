import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import patrickstar as deepspeed
from patrickstar import _C
from patrickstar.config import parse_config
from patrickstar.engine.optimizer_takeover import groups_of
from patrickstar.integrations.decided_config import with_optimizer
from patrickstar.ops.adam import DeepSpeedCPUAdam, FusedAdam
from tests.bits import assert_same_bits
from tests.models import MODELS
from tests.optim.kernel_calls import DTYPES, ISAS, add_up, random_values, sum_squares
from tests.training import ADAM, Run, make_config, relative_error, train

BLOCK = _C.optim.SQUARES_BLOCK
LANES = 64


def squares_in_order(values):
    """[Note: one order of summation] with torch's float64 operations; squares of float32 are exact in it."""
    partials = []
    for begin in range(0, values.numel(), BLOCK):
        block = values[begin : begin + BLOCK].double().square()
        lanes = torch.zeros(LANES, dtype=torch.float64)
        for row in block.split(LANES):
            lanes[: row.numel()] += row
        while lanes.numel() > 1:
            lanes = lanes[: lanes.numel() // 2] + lanes[lanes.numel() // 2 :]
        partials.append(lanes)
    return torch.cat(partials) if partials else torch.empty(0, dtype=torch.float64)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    numel=st.one_of(
        st.integers(0, 200), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 63, BLOCK + 65, 5 * BLOCK + 1000])
    ),
    dtype=st.sampled_from(list(DTYPES)),
    misalign=st.integers(0, 17),
    seed=st.integers(0, 2**31),
)
def test_every_isa_sums_in_the_documented_order(numel, dtype, misalign, seed):
    generator = torch.Generator().manual_seed(seed)
    values = random_values(numel + misalign, dtype, generator, wild=True)[misalign:]
    finite = torch.where(values.isfinite(), values, torch.ones_like(values))
    expected = squares_in_order(finite)
    for isa in ISAS:
        assert_same_bits(sum_squares(isa, finite), expected, isa)
        assert_same_bits(sum_squares(isa, values), sum_squares("scalar", values), f"{isa}, inf and NaN")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_agrees_with_float64(isa, dtype):
    values = random_values(1_000_003, dtype, torch.Generator().manual_seed(1), wild=False)
    exact = math.fsum(values.double().square().tolist())
    error = abs(math.fsum(sum_squares(isa, values).tolist()) - exact) / exact
    print(f"{isa} {dtype}: relative error of the sum of squares {error:.1e}")
    assert error < 1e-14


@pytest.mark.parametrize("isa", ISAS)
def test_threads_and_pieces_change_nothing(isa):
    values = random_values(40 * BLOCK + 77, torch.bfloat16, torch.Generator().manual_seed(2), wild=False)
    expected = sum_squares(isa, values)
    for num_threads in (2, 3, 7):
        assert_same_bits(sum_squares(isa, values, num_threads), expected, f"{num_threads} threads")
    pieces = [sum_squares(isa, piece) for piece in values.split([BLOCK, 7 * BLOCK, 32 * BLOCK, 77])]
    assert_same_bits(torch.cat(pieces), expected, "pieces of whole blocks")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_partial_is_finite_exactly_when_its_block_is(isa, dtype, bad):
    largest = torch.finfo(dtype).max
    values = torch.full((3 * BLOCK + 10,), largest).to(dtype)
    assert sum_squares(isa, values).isfinite().all(), "the largest values of a whole block fit"
    for position in (BLOCK, BLOCK + 63, BLOCK + 2000, 2 * BLOCK - 1):
        poisoned = values.clone()
        poisoned[position] = bad
        assert sum_squares(isa, poisoned).isfinite().tolist() == [True, False, True, True]
    values[-1] = bad
    assert sum_squares(isa, values).isfinite().tolist() == [True, True, True, False]


@pytest.mark.parametrize("isa", ISAS)
def test_denormals_count(isa):
    values = torch.full((BLOCK,), 1e-45)
    torch.set_flush_denormal(True)
    try:
        partial = sum_squares(isa, values).item()
    finally:
        torch.set_flush_denormal(False)
    assert partial == BLOCK * 2.0**-298


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    count=st.one_of(st.integers(0, 5), st.sampled_from([255, 256, 257, 511, 700, 5000])),
    first=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_partials_are_added_up_to_more_than_twice_a_double(count, first, seed):
    """The error is less than 2^-100 of the exact sum, so its order changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    partials = torch.rand(first + count, dtype=torch.float64, generator=generator)
    partials *= 10.0 ** torch.randint(-30, 30, (first + count,), generator=generator)
    high, low = add_up(partials, first)
    exact = sum((Fraction(value) for value in partials[first:].tolist()), Fraction(0))
    assert abs(Fraction(high) + Fraction(low) - exact) <= exact / 2**100
    assert high + low == float(exact) == math.fsum(partials[first:].tolist())


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_sum_is_finite_exactly_when_its_partials_are(bad):
    for position in (0, 255, 256, 999):
        partials = torch.ones(1000, dtype=torch.float64)
        assert add_up(partials) == (1000, 0)
        partials[position] = bad
        assert not math.isfinite(add_up(partials)[0])


STEPS = 4


def reference(name: str) -> Run:
    """PyTorch's corrected Adam in float64, with options that take the correction back.

    The corrected step is lr' / c1 * m / (sqrt(v / c2) + eps') with c1 = 1 - beta1^t and c2 = 1 - beta2^t; it is lr * m
    / (sqrt(v) + eps) for lr' = lr * c1 / sqrt(c2) and eps' = eps / sqrt(c2). Decoupled decay takes lr' * decay'.
    """
    case = MODELS["mlp"]
    torch.manual_seed(0)
    module = case.build().double()
    optimizer = getattr(torch.optim, name)(module.parameters(), **ADAM)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = case.loss(module(**case.batch(generator)))
        loss.backward()
        losses.append(loss.item())
        c1, c2 = (1 - beta**step for beta in ADAM["betas"])
        for group in optimizer.param_groups:
            group["lr"], group["eps"] = ADAM["lr"] * c1 / c2**0.5, ADAM["eps"] / c2**0.5
            if name == "AdamW":
                group["weight_decay"] = ADAM["weight_decay"] * ADAM["lr"] / group["lr"]
        optimizer.step()
    return Run(losses, {name: value.detach().clone() for name, value in module.state_dict().items()}, {})


def test_without_bias_correction():
    for name in ("AdamW", "Adam"):
        expected = reference(name)
        config = make_config(optimizer=name, use_cpu_embedding=True)
        config["optimizer"]["params"]["bias_correction"] = False
        error = relative_error(train(MODELS["mlp"], config, steps=STEPS), expected)
        print(f"{name}: relative error {error:.1e}")
        assert error <= 1e-6
    config["optimizer"]["params"]["bias_correction"] = True
    assert relative_error(train(MODELS["mlp"], config, steps=STEPS), expected) > 1e-3


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x).square().mean()


BATCHES = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(2))
OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
RATES = (0.02, 0.005)  # weights, biases


def layers(dtype=torch.float32):
    torch.manual_seed(0)
    return Layers().to(dtype)


def grouped(module):
    named = dict(module.named_parameters())
    weights = [param for name, param in named.items() if name.endswith("weight")]
    return [
        {"params": weights, "lr": RATES[0]},
        {"params": [named[n] for n in named if n.endswith("bias")], "lr": RATES[1]},
    ]


@torch.no_grad()
def deepspeeds_formula(decoupled):
    """Losses and values in float64, as Step_1 in DeepSpeed's cpu_adam_impl.cpp computes them; without
    correction bias_correction1 = bias_correction2 = 1:

        m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2
        p = (p - lr wd p if AdamW) - lr / bias_correction1 m / (sqrt(v) / sqrt(bias_correction2) + eps)

    with g + wd p in place of g for Adam.
    """
    module = layers(torch.float64)
    states = {param: (torch.zeros_like(param), torch.zeros_like(param)) for param in module.parameters()}
    beta1, beta2 = OPTIONS["betas"]
    losses = []
    for batch in BATCHES.double():
        with torch.enable_grad():
            loss = module(batch)
            gradients = torch.autograd.grad(loss, list(module.parameters()))
        losses.append(loss.item())
        for (name, param), gradient in zip(module.named_parameters(), gradients, strict=True):
            rate = RATES[0] if name.endswith("weight") else RATES[1]
            if not decoupled:
                gradient = gradient + OPTIONS["weight_decay"] * param
            m, v = states[param]
            m.copy_(beta1 * m + (1 - beta1) * gradient)
            v.copy_(beta2 * v + (1 - beta2) * gradient * gradient)
            kept = param * (1 - rate * OPTIONS["weight_decay"]) if decoupled else param
            param.copy_(kept - rate * m / (v.sqrt() + OPTIONS["eps"]))
    return losses, {name: value.clone() for name, value in module.state_dict().items()}


MAKERS = {
    "FusedAdam": (lambda params: FusedAdam(params, bias_correction=False, **OPTIONS), torch.optim.AdamW),
    "FusedAdam, L2": (
        lambda params: FusedAdam(params, bias_correction=False, adam_w_mode=False, **OPTIONS),
        torch.optim.Adam,
    ),
    "DeepSpeedCPUAdam": (lambda params: DeepSpeedCPUAdam(params, bias_correction=False, **OPTIONS), torch.optim.AdamW),
    "DeepSpeedCPUAdam, L2": (
        lambda params: DeepSpeedCPUAdam(params, bias_correction=False, adamw_mode=False, **OPTIONS),
        torch.optim.Adam,
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_deepspeeds_optimizers_without_correction(name):
    make, base = MAKERS[name]
    losses, expected = deepspeeds_formula(decoupled=base is torch.optim.AdamW)
    module = layers()
    optimizer = make(grouped(module))
    assert isinstance(optimizer, base) and isinstance(optimizer, torch.optim.Optimizer)
    assert [group["bias_correction"] for group in optimizer.param_groups] == [False, False]
    found = []
    for batch in BATCHES[:2]:
        optimizer.zero_grad()
        loss = module(batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    # the engine's configuration has another optimizer, which is not used
    config = {"train_batch_size": 6, "gradient_clipping": 0.0, "optimizer": {"type": "Adam", "params": {"lr": 1.0}}}
    engine, hybrid, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    with engine:
        for batch in BATCHES[2:]:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        state = engine.state_dict()
        assert [group["lr"] for group in hybrid.param_groups] == list(RATES)
        assert all("bias_correction" not in group for group in hybrid.param_groups)
        engine.backward(engine(BATCHES[0]))
        with pytest.raises(RuntimeError, match="is in PatrickStar's chunks"):  # never silently nothing
            optimizer.step()
    assert found == pytest.approx(losses, rel=1e-5)
    error = max(float((state[key].double() - value).abs().max() / value.abs().max()) for key, value in expected.items())
    print(f"{name}: relative error {error:.1e}")
    assert error < 1e-6


def test_the_given_optimizer_decides_not_the_configuration():
    states = []
    for params in ({}, {"bias_correction": False}):
        module = layers()
        config = {"train_batch_size": 6, "optimizer": {"type": "AdamW", "params": params}}
        engine, *_ = deepspeed.initialize(model=module, optimizer=FusedAdam(grouped(module), **OPTIONS), config=config)
        with engine:
            engine.backward(engine(BATCHES[0]))
            engine.step()
            states.append(dict(engine.state_dict()))
    assert_same_bits(*states)


def test_integrations_hear_of_it():
    for corrects in (True, False):
        taken = groups_of(FusedAdam(layers().parameters(), bias_correction=corrects))
        made = parse_config(with_optimizer({}, taken))
        assert made.optimizer.params.bias_correction is corrects
    with pytest.raises(ValueError, match="optimizer.params.bias_correction is True in the configuration"):
        with_optimizer({"optimizer": {"params": {"bias_correction": True}}}, taken)


def test_what_deepspeeds_optimizers_do_not_have():
    for make, option in ((FusedAdam, "amsgrad"), (DeepSpeedCPUAdam, "amsgrad")):
        with pytest.raises(ValueError, match=f"{option}=True"):
            make(layers().parameters(), **{option: True})
    with pytest.raises(ValueError, match="fp32_optimizer_states=False"):
        DeepSpeedCPUAdam(layers().parameters(), fp32_optimizer_states=False)

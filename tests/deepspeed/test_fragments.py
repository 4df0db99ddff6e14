import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import patrickstar as deepspeed
from patrickstar import _C, StateError, torch_scope, utils
from tests.deepspeed.test_initialize import config, data
from tests.distributed import run_ranks

BATCHES = list(DataLoader(data(), batch_size=4))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        with torch_scope():
            self.values = nn.Parameter(torch.ones(10))

    def forward(self, x):
        return x * self.values


class Net(nn.Module):
    """One layer is frozen, one parameter stays with PyTorch, one has swapped dimensions in memory."""

    def __init__(self):
        super().__init__()
        self.frozen, self.middle, self.last = nn.Linear(16, 40), nn.Linear(40, 24), nn.Linear(24, 10)
        self.middle.weight = nn.Parameter(self.middle.weight.detach().t().contiguous().t())
        self.frozen.requires_grad_(False)
        self.scale = Scale()

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.scale(self.last(self.middle(self.frozen(x)))).float(), y)


def net():
    torch.manual_seed(0)
    return Net()


PRECISIONS = {
    "float32": {},
    "bfloat16": {"bf16": {"enabled": True}},
    "float16": {"fp16": {"enabled": True, "initial_scale_power": 8}},  # gradients that are set fit in with the scale
}


def engine_of(**more):
    options = config(gradient_accumulation_steps=1, device_memory=260_000, **more)
    return deepspeed.initialize(model=net(), config=options)[0]


def random_like(values, seed, dtype=torch.float32):
    return torch.rand(values.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def set_and_read(precision):
    deepspeed.init_distributed()
    dtype = getattr(torch, precision)
    with engine_of(**PRECISIONS[precision]) as engine:
        trained = [param for param in engine.parameters() if param.requires_grad]
        for step in range(2):
            engine.backward(engine(*BATCHES[step]))
            for index, param in enumerate(trained):
                gradient, value = random_like(param, 100 * step + index, dtype), random_like(param, 50 + index)
                utils.safe_set_full_grad(param, gradient)
                utils.safe_set_full_fp32_param(param, value)
                assert torch.equal(utils.safe_get_full_grad(param), gradient.float())
                assert torch.equal(utils.safe_get_full_fp32_param(param), value)
            engine.step()
            for index, param in enumerate(trained):
                for key in ("exp_avg", "exp_avg_sq"):
                    value = random_like(param, 70 + index)
                    utils.safe_set_full_optimizer_state(param, value, key)
                    assert torch.equal(utils.safe_get_full_optimizer_state(param, key), value)
    return True


def parts(precision):
    deepspeed.init_distributed()
    dtype, found = getattr(torch, precision), {}
    with engine_of(**PRECISIONS[precision]) as engine:
        named = [(name, param) for name, param in engine.named_parameters() if param.requires_grad]
        engine.backward(engine(*BATCHES[0]))
        for name, param in named:
            found[name, "grad"] = utils.safe_get_full_grad(param), utils.safe_get_local_grad(param)
            utils.safe_set_local_grad(param, own_values(engine, found[name, "grad"][1], dtype))
            found[name, "set grad"] = utils.safe_get_full_grad(param), utils.safe_get_local_grad(param)
        engine.step()
        for name, param in named:
            found[name, "value"] = utils.safe_get_full_fp32_param(param), utils.safe_get_local_fp32_param(param)
            utils.safe_set_local_fp32_param(param, own_values(engine, found[name, "value"][1]))
            found[name, "set value"] = utils.safe_get_full_fp32_param(param), utils.safe_get_local_fp32_param(param)
            for key in ("exp_avg", "exp_avg_sq"):
                before = (
                    utils.safe_get_full_optimizer_state(param, key),
                    utils.safe_get_local_optimizer_state(param, key),
                )
                found[name, key] = before
                utils.safe_set_local_optimizer_state(param, own_values(engine, before[1]), key)
                found[name, f"set {key}"] = (
                    utils.safe_get_full_optimizer_state(param, key),
                    utils.safe_get_local_optimizer_state(param, key),
                )
        for param in engine.frozen.parameters():
            assert utils.safe_get_local_fp32_param(param) is None
        engine.backward(engine(*BATCHES[1]))  # the values that were set are trained on
        engine.step()
        return found, {name: param.stride() for name, param in named}


def own_values(engine, part, dtype=torch.float32):
    return torch.full_like(part, 0.25 * (1 + engine.global_rank)).to(dtype)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_set_is_read(precision):
    assert run_ranks(2, set_and_read, precision) == [True, True]


@pytest.mark.parametrize(("num_ranks", "precision"), [(1, "float32"), (2, "float32"), (2, "float16")])
def test_parts_make_the_whole(num_ranks, precision):
    ranks = run_ranks(num_ranks, parts, precision)
    strides = ranks[0][1]
    for name, what in ranks[0][0]:
        whole = ranks[0][0][name, what][0]
        mine = [rank[0][name, what][1] for rank in ranks]
        if name == "scale.values":
            expected = [rank[0][name, what][0].reshape(-1) for rank in ranks]
        else:
            flat = whole.as_strided((whole.numel(),), (1,))
            assert whole.stride() == strides[name]
            expected = list(flat.split([len(part) for part in mine]))
        assert all(torch.equal(rank[0][name, what][0], whole) for rank in ranks if name != "scale.values")
        assert all(torch.equal(part, own) for part, own in zip(mine, expected, strict=True))
        if what.startswith("set"):
            assert all(bool((part == 0.25 * (1 + rank)).all()) for rank, part in enumerate(mine))
    assert any(len(rank[0]["last.bias", "value"][1]) == 0 for rank in ranks) == (num_ranks > 1)


def test_what_the_optimizer_does_not_have_is_none():
    with engine_of() as engine:
        engine.backward(engine(*BATCHES[0]))
        frozen, trained = engine.frozen.weight, engine.last.weight
        for read in (utils.safe_get_full_fp32_param, utils.safe_get_full_grad, utils.safe_get_local_grad):
            assert read(frozen) is None
            assert read(trained) is not None
        engine.step()
        for key in ("exp_avg", "exp_avg_sq"):
            assert utils.safe_get_full_optimizer_state(frozen, key) is None
            assert utils.safe_get_local_optimizer_state(frozen, key) is None
        with pytest.raises(ValueError, match="frozen or in no group"):
            utils.safe_set_full_optimizer_state(frozen, torch.zeros(40, 16), "exp_avg")
        with pytest.raises(ValueError, match=r"frozen\.weight is frozen or in no group"):
            utils.safe_set_local_fp32_param(frozen, torch.zeros(640))
        with pytest.raises(ValueError, match=r"has 3 elements, this rank's part of last\.bias 10"):
            utils.safe_set_local_fp32_param(engine.last.bias, torch.zeros(3))


def test_states_that_are_set_before_the_first_update():
    plain = net()
    reference = torch.optim.AdamW(
        [p for p in plain.parameters() if p.requires_grad], lr=0.01, betas=(0.8, 0.95), weight_decay=0.1
    )
    states = {"exp_avg": 0.5, "exp_avg_sq": 0.25}
    with engine_of(gradient_clipping=0.0) as engine:
        for param, own in ((engine.last.weight, plain.last.weight), (engine.module.scale.values, plain.scale.values)):
            for key, value in states.items():
                assert not utils.safe_get_full_optimizer_state(param, key).any()
                utils.safe_set_full_optimizer_state(param, torch.full(param.shape, value), key)
            for key, value in states.items():
                assert bool((utils.safe_get_full_optimizer_state(param, key) == value).all())
            reference.state[own] = {"step": torch.tensor(0.0)}
            reference.state[own] |= {key: torch.full_like(own, value) for key, value in states.items()}
        engine.backward(engine(*BATCHES[0]))
        engine.step()
        with _C.HostAllocations():
            plain(*BATCHES[0]).backward()
            reference.step()
        for param, own in ((engine.last.weight, plain.last.weight), (engine.module.scale.values, plain.scale.values)):
            torch.testing.assert_close(utils.safe_get_full_fp32_param(param), own.detach(), rtol=1e-5, atol=1e-7)


def test_many_gradients_are_changed_at_once():
    with engine_of(gradient_clipping=0.0) as engine:
        with pytest.raises(StateError, match="call backward first"):
            utils.safe_update_full_grad_vectorized(engine.parameters(), lambda gradient, param: gradient)
        engine.backward(engine(*BATCHES[0]))
        before = {param: utils.safe_get_full_grad(param) for param in engine.parameters()}
        utils.safe_update_full_grad_vectorized(engine.parameters(), lambda gradient, param: gradient * param.ndim)
        for param, gradient in before.items():
            if gradient is not None:
                torch.testing.assert_close(utils.safe_get_full_grad(param), gradient * param.ndim, rtol=1e-6, atol=0)
        with pytest.raises(ValueError, match=r"the value has shape \(2,\)"):
            utils.safe_update_full_grad_vectorized([engine.last.bias], lambda gradient, param: gradient[:2])
        engine.step()
        squares = sum(float((g * p.ndim).double().square().sum()) for p, g in before.items() if g is not None)
        assert engine.get_global_grad_norm() == pytest.approx(squares**0.5, rel=1e-6)


def test_sums_of_micro_batches_within_no_sync():
    found = []
    with engine_of() as engine:
        for _ in range(2):
            with engine.no_sync():
                for batch in BATCHES[:3]:
                    loss = engine(*batch)
                    engine.backward(loss)
                    gradient = utils.safe_get_full_grad(engine.last.weight)
                    found.append((loss.item(), gradient.norm().item()))
            engine.zero_grad()
    assert found[:3] == found[3:]
    assert len({norm for _, norm in found}) == 3

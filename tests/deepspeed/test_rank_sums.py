import pytest
import torch
from torch import nn

import patrickstar as deepspeed
from patrickstar import torch_scope
from patrickstar.utils import safe_get_full_grad, safe_set_full_grad
from tests.distributed import run_ranks

STEPS = 3
LARGE = 40_000.0  # in float16; twice as much is not


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))
        with torch_scope():
            self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x) * self.scale, y)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        with torch_scope(do_allreduce=False):
            self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layer(x) + self.shift, y)


def seeded(model_class):
    torch.manual_seed(0)
    return model_class()


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 8, generator=generator), torch.randn(2, 4, generator=generator)


def options(**more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_allreduce_op": "Sum",  # in any case, as with DeepSpeed
        "gradient_clipping": 0.5,
        "default_chunk_size": 1024,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **more,
    }


def train():
    deepspeed.init_distributed()
    engine, *_ = deepspeed.initialize(model=seeded(Mixed), config=options())
    rank, norms = engine.global_rank, []
    with engine:
        weight = engine.layers[0].weight
        for step in range(STEPS):
            engine.backward(engine(*batch(step, rank)))
            if step == 0:
                gradients = {name: safe_get_full_grad(param) for name, param in engine.named_parameters()}
            if step == STEPS - 1:  # values that are set are read back and used by the update
                half = safe_get_full_grad(weight) / 2
                safe_set_full_grad(weight, half)
                torch.testing.assert_close(safe_get_full_grad(weight), half, rtol=1e-6, atol=0)
            engine.step()
            norms.append(engine.get_global_grad_norm())
        state = engine.state_dict()
    engine, *_ = deepspeed.initialize(model=seeded(Own), config=options(gradient_clipping=0.0))
    with engine:
        engine.backward(engine(*batch(0, rank)))
        own = safe_get_full_grad(engine.shift)
    return norms, gradients, state, own


def plain_run(num_ranks):
    module = seeded(Mixed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.0)
    norms, gradients = [], {}
    for step in range(STEPS):
        for rank in range(num_ranks):
            module(*batch(step, rank)).backward()
        if step == 0:
            gradients = {name: param.grad.clone() for name, param in module.named_parameters()}
        if step == STEPS - 1:
            module.layers[0].weight.grad /= 2
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        optimizer.step()
        module.zero_grad()
    return norms, gradients, module.state_dict()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums(num_ranks):
    norms, gradients, state = plain_run(num_ranks)
    for rank, (rank_norms, rank_gradients, rank_state, own) in enumerate(run_ranks(num_ranks, train)):
        assert rank_norms == pytest.approx(norms, rel=1e-6)
        for name, value in gradients.items():
            torch.testing.assert_close(rank_gradients[name], value, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(rank_state[name], state[name], rtol=1e-5, atol=1e-7)
        plain = seeded(Own)
        plain(*batch(0, rank)).backward()
        torch.testing.assert_close(own, plain.shift.grad, rtol=1e-5, atol=1e-7)


def train_in_float16():
    deepspeed.init_distributed()
    model = nn.Linear(64, 1, bias=False)
    nn.init.zeros_(model.weight)
    fp16 = {"enabled": True, "loss_scale": 1.0}
    engine, *_ = deepspeed.initialize(model=model, config=options(fp16=fp16, gradient_clipping=0.0))
    with engine:
        engine.backward(engine(torch.full((1, 64), LARGE)).sum())
        engine.step()
        return engine.was_step_applied(), engine.get_global_grad_norm()


def test_a_sum_beyond_float16_is_no_overflow():
    for applied, norm in run_ranks(2, train_in_float16):
        assert applied
        assert norm == pytest.approx(2 * LARGE * 8, rel=1e-6)

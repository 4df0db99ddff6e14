import pytest
import torch
from torch import nn

import patrickstar as deepspeed
from tests.bits import assert_same_bits
from tests.deepspeed.test_initialize import config, data, net, plain_run
from tests.distributed import run_ranks

STEPS = 3


def train(folder):
    deepspeed.init_distributed()
    engine, _, loader, _ = deepspeed.initialize(
        model=net(), training_data=data(), config=config(train_batch_size=16, device_memory=260_000)
    )
    with engine:
        losses, norms = [], []
        batches = iter(loader)
        for _ in range(STEPS):
            for _ in range(2):
                loss = engine(*next(batches))
                engine.backward(loss)
                losses.append(loss.item())
                gradient = deepspeed.utils.safe_get_full_grad(engine.layers[0].weight)
                engine.step()
            norms.append(engine.get_global_grad_norm())
        state = engine.state_dict()
        engine.save_16bit_model(folder)
        module_state = engine.module.state_dict()
        with deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=1), torch.no_grad():
            if engine.global_rank == 1:
                nn.init.constant_(engine.layers[4].bias, 2.5)
        changed = deepspeed.utils.safe_get_full_fp32_param(engine.layers[4].bias)
        return {
            "losses": losses,
            "norms": norms,
            "gradient": gradient,
            "state": state,
            "module_state": module_state,
            "changed": changed,
            "places": (engine.global_rank, engine.world_size, engine.global_samples),
        }


def test_two_ranks(tmp_path):
    one, other = run_ranks(2, train, str(tmp_path))
    losses, norms, state = plain_run(STEPS, num_ranks=2)
    assert one["places"] == (0, 2, 48)
    assert other["places"] == (1, 2, 48)
    assert one["losses"] == pytest.approx(losses[0::2], rel=1e-6)
    assert other["losses"] == pytest.approx(losses[1::2], rel=1e-6)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    for rank in (one, other):
        assert rank["norms"] == pytest.approx(norms, rel=1e-6)
        assert_same_bits(rank["gradient"], one["gradient"])
        assert float(rank["gradient"].norm()) <= norms[-1] * (1 + 1e-6)
        assert bool((rank["changed"] == 2.5).all())
        for name, value in state.items():
            torch.testing.assert_close(rank["state"][name], value, rtol=1e-5, atol=1e-7)
            assert_same_bits(rank["module_state"][name], rank["state"][name], name)
            assert_same_bits(saved[name], rank["state"][name].bfloat16(), name)

import pytest
import torch

from patrickstar.runtime import initialize_engine
from tests.checkpoint.foreign.deepspeed_files import save_zero
from tests.distributed import run_ranks
from tests.models import gpt2, token_batch

ADAM = {"lr": 3e-3, "betas": (0.8, 0.97), "eps": 1e-7, "weight_decay": 0.1}


def plain(steps):
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    train(model, steps, 1, optimizer.step, lambda loss: loss.backward(), optimizer.zero_grad)
    return model, optimizer


def train(model, steps, seed, step, backward, zero_grad):
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        zero_grad()
        loss = model(**token_batch(generator))["loss"]
        backward(loss)
        step()
        losses.append(loss.item())
    return losses


def continue_on_a_mesh(folder):
    torch.manual_seed(5)
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}, "tensor_parallel": {"rows": 1, "columns": 2}}
    engine, optimizer = initialize_engine(gpt2, 0, config)
    with engine:
        engine.load_checkpoint(folder)
        return train(engine, 3, 2, optimizer.step, engine.backward, optimizer.zero_grad)


@pytest.mark.slow
def test_a_tensor_parallel_engine_continues(tmp_path):
    model, optimizer = plain(2)
    save_zero(tmp_path, model, optimizer, stage=3, ranks=2, shared_params={"lm_head.weight": "transformer.wte.weight"})
    expected = train(model, 3, 2, optimizer.step, lambda loss: loss.backward(), optimizer.zero_grad)
    for losses in run_ranks(2, continue_on_a_mesh, tmp_path):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)

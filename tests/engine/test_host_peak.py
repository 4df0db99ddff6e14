import pytest
import torch

from patrickstar import _C
from patrickstar.config import Dialect, parse_config
from patrickstar.runtime import initialize_engine
from tests.models import VOCAB, Case, gpt2, token_batch
from tests.training import make_config

STEPS = 3


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 30, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, pad_token_id=0, **sizes))


CASES = {"gpt2": Case(lambda: gpt2(hidden=64, layers=36), token_batch), "llama": Case(llama, token_batch)}


def peaks(case, config, accumulate=1):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(case.build, 0, config)
    with engine:
        engine.train()
        generator = torch.Generator().manual_seed(1)
        for step in range(STEPS):
            for _ in range(accumulate):
                engine.backward(case.loss(engine(**case.batch(generator))))
            if step == 0:
                engine.grad_norm()
                before = engine.report()
            optimizer.step()
        chunks = [engine._session.layout.chunk(index) for index in range(before["num_chunks"])]
        assert max(chunk["numel"] for chunk in chunks) <= 0.01 * sum(chunk["numel"] for chunk in chunks)
        return before, engine.report()


SETTINGS = [(4, 4.0, "always", 0.0), (4, 0.9, "always", 0.0), (2, 1.1, "always", 1e-3)]
"""Device budget over an eighth of the host's need, host budget over that need, speculation, clipping."""


@pytest.mark.parametrize(
    ("name", "precision"), [pytest.param("gpt2", "bf16", marks=pytest.mark.slow), ("llama", "fp32")]
)
def test_predicted_against_mapped(name, precision):
    case = CASES[name]
    base = make_config(precision, default_chunk_size=8 * 1024)
    engine, _ = initialize_engine(case.build, 0, base)
    with engine:
        _, need, _ = _C.initial_placement(engine._session.layout, 2**60, 0)
    for device_share, host_share, speculation, clipping in SETTINGS:
        config = {**base, "device_memory": int(need / 8 * device_share), "host_memory": int(need * host_share)}
        config |= {"gradient_clipping": clipping, "optimizer": {**base["optimizer"], "speculation": speculation}}
        before, after = peaks(case, config)
        predicted, mapped = before["predicted_host_peak_bytes"], after["host_peak_bytes"]
        print(
            f"{device_share} {host_share} {speculation} {clipping}: {predicted} {mapped} {predicted / mapped - 1:+.2%}"
        )
        assert mapped <= predicted <= 1.05 * mapped


def test_gradients_that_accumulate():
    config = make_config("bf16", default_chunk_size=8 * 1024, device_memory="6MB")
    config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0}
    before, after = peaks(CASES["gpt2"], parse_config(config, Dialect.DEEPSPEED), accumulate=2)
    predicted, mapped = before["predicted_host_peak_bytes"], after["host_peak_bytes"]
    print(f"{predicted} {mapped} {predicted / mapped - 1:+.2%}")
    assert mapped <= predicted <= 1.05 * mapped


def test_plans_without_an_engine_say_the_same():
    config = make_config("bf16", default_chunk_size=8 * 1024, device_memory="12MB", host_memory="60MB")
    config["optimizer"]["speculation"] = "always"
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(CASES["gpt2"].build, 0, config)
    with engine:
        engine.train()
        engine.backward(CASES["gpt2"].loss(engine(**token_batch(torch.Generator().manual_seed(1)))))
        optimizer.step()
        report, chunks = engine.report(), engine.plan().chunks
        on_device = [chunk.states_on_device for chunk in chunks]
        assert 0 < sum(on_device) < len(chunks)
        layout = engine._session.layout
        found = _C.host_peak_bytes(layout, [_C.Tier.HOST] * len(chunks), on_device, 60 * 10**6, updates_ahead=True)
        assert found == report["predicted_host_peak_bytes"]

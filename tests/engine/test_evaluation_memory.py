import pytest
import torch

from patrickstar.runtime import initialize_engine
from tests.models import Case
from tests.training import least_device_memory, make_config

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MODELS = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},  # changes its logits
    "SmolLM3": {},
    "Gemma3": {"head_dim": 8, "sliding_window": 16},
}


def case_of(name, shape=SHAPE, tokens_per_sample=64):
    import transformers

    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")

    def build():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(config(**shape, **MODELS[name]))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def batch(generator):
        tokens = torch.randint(3, shape["vocab_size"], (2, tokens_per_sample), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    return Case(build, batch)


def check_fits(case, config, budget):
    batch = case.batch(torch.Generator().manual_seed(1))
    engine, optimizer = initialize_engine(case.build, 0, {**config, "device_memory": budget})
    with engine:
        for _ in range(2):
            engine.train()
            engine.backward(engine(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                assert engine.eval()(**batch).loss.isfinite()
            prompt = batch["input_ids"][:, :8].to(engine.device)
            tokens = engine.module.generate(prompt, max_new_tokens=3, do_sample=False)
            assert tokens.shape == (2, 11)
        assert engine.report()["device_peak_bytes"] <= budget


@pytest.mark.parametrize("loss", ["whole", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_they_fit_where_training_fits(name, loss):
    case = case_of(name)
    config = make_config("bf16", default_chunk_size=16384, activations={"loss": loss})
    check_fits(case, config, least_device_memory(case, config, steps=2))

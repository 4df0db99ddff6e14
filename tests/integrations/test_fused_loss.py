import copy

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import patrickstar.sequence.losses
from patrickstar import initialize_engine
from patrickstar.integrations.fused_loss import LateLogits, fuse_loss

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(vocab_size=512, **SMALL)),
    "qwen2, tied": (
        Qwen2ForCausalLM,
        Qwen2Config(vocab_size=512, num_key_value_heads=2, tie_word_embeddings=True, **SMALL),
    ),
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=4, **NO_DROPOUT)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(vocab_size=512, head_dim=8, num_key_value_heads=4, **SMALL)),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(patrickstar.sequence.losses, "_TILE_LOGITS", 512 * 5)


def build(name):
    torch.manual_seed(0)
    kind, config = MODELS[name]
    return kind(copy.deepcopy(config)).train()


def batch():
    tokens = torch.randint(512, (3, 14), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[1, 9:] = -100
    return {"input_ids": tokens, "labels": labels}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(70)}], ids=["mean", "of all batches"])
def test_losses_and_gradients(name, options):
    plain, fused = build(name), build(name)
    fuse_loss(fused)
    expected, output = plain(**batch(), **options), fused(**batch(), **options)
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    expected.loss.backward()
    output.loss.backward()
    for (place, want), got in zip(plain.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-7, msg=place)
    assert isinstance(output.logits, LateLogits) == (name != "gemma2")  # gemma2 caps its logits
    assert output.logits.shape == expected.logits.shape
    if isinstance(output.logits, LateLogits):
        with pytest.raises(RuntimeError, match=r"not made.*call the model without labels, or under torch.no_grad\(\)"):
            output.logits.argmax(-1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_evaluation_and_generation_give_logits(num_ranks):
    plain, fused = build("llama").eval(), build("llama").eval()
    fuse_loss(fused, num_ranks)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            expected, output = plain(**batch()), fused(**batch())
        assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
        assert isinstance(output.logits, LateLogits) == (num_ranks == 1)
        assert torch.equal(output.logits.argmax(-1), expected.logits.argmax(-1))
    with torch.no_grad():
        late, used = fused(**batch()).logits, output.logits
        fused(**batch())
        assert torch.equal(used + 0, expected.logits)
        if num_ranks == 1:
            with pytest.raises(RuntimeError, match="not made.*another forward came meanwhile"):
                late.argmax(-1)
    tokens = batch()["input_ids"]
    assert torch.equal(
        fused.generate(tokens, max_new_tokens=4, do_sample=False),
        plain.generate(tokens, max_new_tokens=4, do_sample=False),
    )
    assert torch.equal(fused.train()(tokens).logits, plain.train()(tokens).logits)
    assert list(fused.state_dict()) == list(plain.state_dict())


def train(is_fused, **budget):
    def make():
        model = build("llama")
        if is_fused:
            fuse_loss(model)
        return model

    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "default_chunk_size": 4096, **budget}
    engine, optimizer = initialize_engine(make, config=config)
    losses = []
    with engine:
        for _ in range(5):
            optimizer.zero_grad()
            loss = engine(**batch()).loss
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses, engine.report()["device_peak_bytes"]


def test_in_an_engine():
    ample, peak = train(True)
    scarce, used = train(True, device_memory=int(0.8 * peak))
    assert scarce == ample and used < peak
    plain, plain_peak = train(False)
    assert ample == pytest.approx(plain, rel=1e-5)
    assert peak < plain_peak


def test_what_cannot_be_fused_is_refused():
    with pytest.raises(
        ValueError, match="BertForMaskedLM has a loss of its own; only ForCausalLM can be fused|no linear"
    ):
        fuse_loss(BertForMaskedLM(BertConfig(vocab_size=64, **SMALL)))
    with pytest.raises(ValueError, match="LlamaModel has no linear output layer"):
        fuse_loss(build("llama").model)
    model = build("llama")
    fuse_loss(model)
    with pytest.raises(ValueError, match="LlamaForCausalLM has a loss of its own"):
        fuse_loss(model)

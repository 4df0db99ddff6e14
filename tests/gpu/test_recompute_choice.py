import functools

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from patrickstar.activations.activation_rules import Saved
from tests.models import Case, gpt2, llama
from tests.training import assert_same, make_config, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
LENGTH, LAYERS, VOCAB, STEPS = 1024, 4, 512, 4
NOTHING, PRODUCTS, ON_HOST, EVERYTHING = Saved


def batch(generator, rows=4, length=LENGTH, vocab=VOCAB):
    tokens = torch.randint(0, vocab, (rows, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, moe_intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


class Plain(nn.Module):
    """Checkpoints parts of its own with PyTorch's function."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(256, VOCAB)

    def forward(self, input_ids, labels):
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return {"loss": nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())}


CASES = {
    "gpt2": Case(
        functools.partial(gpt2, hidden=256, layers=LAYERS, dropout=0.1, length=LENGTH),
        functools.partial(batch, vocab=97),
    ),
    "llama": Case(functools.partial(llama, hidden=256, layers=LAYERS, vocab=VOCAB, length=LENGTH), batch),
    "qwen3-moe": Case(qwen3_moe, batch),
    "plain": Case(Plain, batch),
}


def run(name, recompute, saved=None, **config):
    def choose(engine, step):
        if saved is not None:
            engine._session.checkpoint_calls.choose(saved)

    config = make_config("bf16", activations={"recompute": recompute}, default_chunk_size=2**20, **config)
    checkpointing = None if name == "plain" else False
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # deterministic backwards
        return train(CASES[name], config, STEPS, checkpointing=checkpointing, before_step=choose)


@pytest.mark.parametrize("name", CASES)
def test_every_choice_has_the_same_bits(name):
    expected = run(name, "always")
    chosen = [(PRODUCTS,) * LAYERS, (EVERYTHING,) * LAYERS, (NOTHING, ON_HOST, PRODUCTS, EVERYTHING)]
    for saved in chosen:
        for config in ({}, {"device_memory": "1GiB"}):
            assert_same(run(name, "always", saved, **config), expected)
    assert_same(run(name, "auto"), expected)


WIDE = Case(
    functools.partial(llama, hidden=1024, layers=8, heads=8, kv_heads=2, vocab=VOCAB, length=4096, attention="sdpa"),
    functools.partial(batch, length=4096),
)


def test_calls_save_what_there_is_room_for(caplog):
    counts, runs = [], []
    for recompute, config in (("always", {}), ("auto", {}), ("auto", {"device_memory": "4GiB"})):
        found = []
        config = make_config("bf16", activations={"recompute": recompute}, default_chunk_size=2**22, **config)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), caplog.at_level("INFO", "patrickstar"):
            runs.append(
                train(
                    WIDE, config, STEPS, checkpointing=False,
                    before_step=lambda engine, step, found=found: found.append(engine._session.checkpoint_calls.saved),
                )
            )  # fmt: skip
        counts.append(sum(kept is not NOTHING for kept in found[-1]))
        print(recompute, config.get("device_memory"), found)
    assert counts[0] == 0
    assert counts[1] == 8
    assert "of 8 checkpointed layers" in caplog.text
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])

import pytest
import torch

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.ranks.mixed_models import batch, build
from tests.training import make_config

NUM_EXPERTS, TOP_K, LAYERS = 32, 2, 8
FEW, MANY = 3, NUM_EXPERTS // TOP_K  # tokens
FAMILIES = {  # experts' field of the configuration, and a budget below the weights
    "Qwen3Moe": ("num_experts", "560KiB"),
    "GptOss": ("num_local_experts", "1200KiB"),
}


class Evaluations:
    """Logits of prompts of several lengths, and the bytes that each uploads."""

    def __init__(self, family, steps, device_memory):
        torch.manual_seed(0)
        config = make_config("bf16", default_chunk_size=4096, device_memory=device_memory)
        changes = {FAMILIES[family][0]: NUM_EXPERTS, "num_hidden_layers": LAYERS, "layer_types": None}
        engine, optimizer = initialize_engine(build(family, "grouped_mm", **changes), 0, config)
        self.uploaded, self.logits = {}, {}
        with engine:
            for step in range(steps):
                engine.backward(engine(**batch(family, step, True, False)).loss)
                optimizer.step()
                optimizer.zero_grad()
            engine.eval()
            for experts in ("grouped_mm", "batched_mm"):  # generate() chooses the second on GPUs
                engine.module.set_experts_implementation(experts)
                for length in (FEW, MANY, FEW + 1):
                    before = engine.report()["uploaded_bytes"]
                    with torch.no_grad():
                        logits = engine(input_ids=torch.arange(1, length + 1)[None]).logits
                    self.logits[experts, length] = logits
                    self.uploaded[experts, length] = engine.report()["uploaded_bytes"] - before
            self.tokens = engine.generate(torch.arange(1, 3)[None], max_new_tokens=5, do_sample=False)
            self.experts = sum(2 * p.numel() for p in engine.module.parameters() if p.dim() == 3)
            self.others = sum(2 * p.numel() for p in engine.module.parameters()) - self.experts
            self.state = engine.state_dict()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [0, 2])
def test_few_tokens_bring_their_experts_alone(family, steps):
    within, ample = Evaluations(family, steps, FAMILIES[family][1]), Evaluations(family, steps, "64MiB")
    for call, logits in within.logits.items():
        assert torch.equal(logits, ample.logits[call])
    assert torch.equal(within.logits["batched_mm", MANY], within.logits["grouped_mm", MANY])
    for length in (FEW, FEW + 1):
        batched, grouped = within.logits["batched_mm", length], within.logits["grouped_mm", length]
        # fused gpt-oss rounds gates and biases once, batched_mm after each operation
        assert (batched - grouped).float().norm() <= 2 * torch.finfo(torch.bfloat16).eps * grouped.float().norm()
    assert torch.equal(within.tokens, ample.tokens)
    assert_same_bits(within.state, ample.state)
    print(within.uploaded, within.experts, within.others)
    for experts in ("grouped_mm", "batched_mm"):
        found = within.uploaded[experts, FEW]
        assert found <= within.experts * FEW * TOP_K / NUM_EXPERTS + 2 * within.others
    assert within.uploaded["grouped_mm", MANY] >= within.experts / 2

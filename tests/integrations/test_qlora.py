import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import patrickstar
from patrickstar import _C
from patrickstar.integrations.weights import adapter_state
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_python
from tests.models import llama, token_batch
from tests.quant.formulas import dequantized
from tests.training import ADAM, make_config

STEPS = 4


def lora(model: nn.Module, **options) -> PeftModel:
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    return get_peft_model(model, LoraConfig(**options)).train()


def saved(folder) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = llama()
    model.save_pretrained(folder, max_shard_size="20kB")
    return model


def dequantize_base(model: nn.Module, kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Replaces linear layers but the head by their dequantised values, in place."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "proj" in name and "lora" not in name:
                param.copy_(dequantized(param, kind, dtype))
    return model


def trained(param_source):
    return [param for param in param_source.parameters() if param.requires_grad]


def train_engine(engine, optimizer) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = engine.module(**token_batch(generator)).loss
        engine.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_plain(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(trained(model), **ADAM)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = model(**token_batch(generator)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_lora_on_a_folder(tmp_path, kind):
    saved(tmp_path / "base")
    base = patrickstar.from_pretrained(tmp_path / "base", quantization=kind)
    model = lora(base, lora_dropout=0.0)
    assert all(param.is_meta for param in model.parameters())
    config = make_config(device_memory=400_000, default_chunk_size=2048)
    engine, optimizer = initialize_engine(lambda: model, 0, config, trained)
    plain = lora(dequantize_base(LlamaForCausalLM.from_pretrained(tmp_path / "base"), kind))
    with engine:
        first = {name: engine.full_value(param) for name, param in engine.named_parameters()}
        assert set(first) == {name for name, _ in plain.named_parameters()}
        with _C.HostAllocations(), torch.no_grad():
            for name, param in plain.named_parameters():
                if "lora_B" in name:
                    assert not first[name].any()
                elif "lora_A" in name:
                    assert 0 < first[name].std() < 1
                    param.copy_(first[name])
                else:
                    assert_same_bits(first[name], param.detach(), name)
        with _C.HostAllocations():
            expected = train_plain(plain)
        losses = train_engine(engine, optimizer)
        assert losses[0] == expected[0]
        assert losses == pytest.approx(expected, rel=1e-5)
        with _C.HostAllocations():
            engine.module.save_pretrained(tmp_path / "adapter", state_dict=adapter_state(engine))
        values = {name: engine.full_value(param) for name, param in engine.named_parameters() if "lora" in name}
        assert engine.report()["downloaded_bytes"] < 20 * 8 * sum(value.numel() for value in values.values())
    loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert_same_bits({name: dict(loaded.named_parameters())[name].detach() for name in values}, values)
    batch = token_batch(torch.Generator().manual_seed(9))
    with torch.no_grad():
        before = model.eval()(**batch).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(**batch).logits, before, rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name, _ in merged.named_parameters())


def test_other_adapters_on_a_folder(tmp_path):
    plain = saved(tmp_path)
    model = lora(patrickstar.from_pretrained(tmp_path, quantization="nf4"), modules_to_save=["lm_head"])
    engine, _ = initialize_engine(lambda: model, 0, make_config(), trained)
    with engine:
        state = {name: engine.full_value(param) for name, param in engine.named_parameters()}
        (head,) = (value for name, value in state.items() if "lm_head.modules_to_save" in name)
        assert_same_bits(head, plain.lm_head.weight.detach())
    gaussian = lora(patrickstar.from_pretrained(tmp_path), r=8, init_lora_weights="gaussian")
    with initialize_engine(lambda: gaussian, 0, make_config(), trained)[0] as engine:
        values = [engine.full_value(param) for name, param in engine.named_parameters() if "lora_A" in name]
        assert float(torch.cat([value.flatten() for value in values]).std()) == pytest.approx(1 / 8, rel=0.1)
    dora = lora(patrickstar.from_pretrained(tmp_path, quantization="nf4"), use_dora=True)
    with pytest.raises(ValueError, match="adapters that are made of their base's values"):
        initialize_engine(lambda: dora, 0, make_config(), trained)


def test_dora_on_a_model_that_exists():
    def build() -> PeftModel:
        torch.manual_seed(0)
        base = llama()
        torch.manual_seed(1)
        return lora(base, use_dora=True)

    plain = dequantize_base(build(), "nf4")
    config = make_config(device_memory=600_000, default_chunk_size=4096, quantization={"type": "nf4"})
    engine, optimizer = initialize_engine(build, 0, config, trained)
    with engine:
        losses = train_engine(engine, optimizer)
    expected = train_plain(plain)
    assert losses[0] == expected[0]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_what_a_folder_can_be_quantised_to(tmp_path):
    saved(tmp_path)
    base = patrickstar.from_pretrained(tmp_path, AutoModelForCausalLM, quantization={"skip_modules": ["mlp"]})
    frozen = {name for name, param in base.named_parameters() if not param.requires_grad}
    assert frozen == {name for name, _ in base.named_parameters() if "self_attn" in name}
    like_qlora = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["mlp"]
    )
    asked = patrickstar.from_pretrained(tmp_path, quantization_config=like_qlora)
    assert {name for name, param in asked.named_parameters() if not param.requires_grad} == frozen
    for config, message in (
        (BitsAndBytesConfig(load_in_4bit=True), "bnb_4bit_quant_type='fp4'.*quantization=\"nf4\""),
        (BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), "bnb_4bit_use_double_quant=False"),
        (BitsAndBytesConfig(load_in_8bit=True), 'quantization="int8"'),
        (BitsAndBytesConfig(), "quantises nothing"),
        ("fp4", "quantization is 'fp4'; give 'nf4', 'int8'"),
        ({"types": "nf4"}, "give 'nf4', 'int8', or a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            patrickstar.from_pretrained(tmp_path, quantization=config)
    config = LlamaConfig.from_pretrained(tmp_path)
    config.quantization_config = {"quant_method": "bitsandbytes"}
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantised already"):
        patrickstar.from_pretrained(tmp_path, quantization="nf4")


MEMORY_SCRIPT = """
import sys, patrickstar
from patrickstar.module import adoption
from patrickstar.runtime import initialize_engine
from tests.peak_memory import PeakMemory
adoption._UNIT_BYTES = 2**23  # of 80 MiB, as 512 MiB are of a large model's
model = patrickstar.from_pretrained(sys.argv[1], quantization="nf4")
numel = sum(p.numel() for p in model.parameters())
config = {"bf16": {"enabled": True}, "device_memory": 4_000_000, "default_chunk_size": 2**20}
with PeakMemory() as memory:
    engine, _ = initialize_engine(lambda: model.requires_grad_(False), 0, config)
print(memory.peak / numel, memory.end / numel)
"""


def test_memory_of_a_folder(tmp_path):
    """Mapped files apart, less than a byte per weight is ever taken."""
    model = llama(hidden=512, layers=8, heads=8, kv_heads=8, intermediate=2048, vocab=512, length=2048)
    model.bfloat16().save_pretrained(tmp_path, max_shard_size="30MB")
    done = run_python("-c", MEMORY_SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    peak, after = map(float, done.stdout.splitlines()[-1].split())
    print(f"{peak:.2f} bytes per parameter at the peak, {after:.2f} afterwards")
    assert peak < 1.2
    assert after < 0.9

"""Folders of models whose files transformers converts: mixtures of experts, vision-language models, FP8 weights."""

import json
import logging
import weakref

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import conversion_mapping
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

import patrickstar
from patrickstar.command.checkpoints import main
from patrickstar.integrations.weights import load_into
from patrickstar.module import pretrained
from patrickstar.module.conversions import ModelValues
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.integrations.zoo import ZOO
from tests.ranks.mixed_models import MIXTURES, TEXT
from tests.ranks.mixed_models import build as build_family

FAMILIES = [*dict.fromkeys([*MIXTURES, *ZOO]), "HrmText"]


def build(family, **changes):
    """A model of random values in all tensors."""
    if family == "HrmText":
        model = transformers.HrmTextForCausalLM(transformers.HrmTextConfig(**{**TEXT, "num_key_value_heads": 4}))
    else:
        model = build_family(family, **changes)()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(std=0.1, generator=generator)
    return model


def engine_of(model):
    return initialize_engine(lambda: model, 0, {})[0]


@pytest.mark.parametrize("family", FAMILIES)  # in HrmText's files query, key and value are one tensor
def test_folders_are_those_of_transformers(tmp_path, family):
    model = build(family)
    model.save_pretrained(tmp_path / "saved", max_shard_size="60kB")
    plain = type(model).from_pretrained(tmp_path / "saved")
    loaded = patrickstar.from_pretrained(tmp_path / "saved")
    assert all(param.is_meta for param in loaded.parameters())
    with engine_of(loaded) as engine:
        assert_same_bits(dict(engine.state_dict()), dict(plain.state_dict()))
        engine.export_weights(tmp_path / "exported", dtype=None)
    plain.save_pretrained(tmp_path / "saved again")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert_same_bits(exported, load_file(tmp_path / "saved again" / "model.safetensors"))
    again = type(model).from_pretrained(tmp_path / "exported")
    assert_same_bits(dict(again.state_dict()), dict(model.state_dict()))


def test_a_layer_of_experts_at_a_time(tmp_path, monkeypatch):
    build("Qwen3Moe", num_hidden_layers=4).save_pretrained(tmp_path)
    held = []
    most = []

    def watched(read):
        def reading(self, name, *args):
            value = read(self, name, *args).clone()  # of its own memory, not the file's
            held.append((name.split(".experts")[0], value.numel(), weakref.ref(value)))
            alive = [(layer, numel) for layer, numel, ref in held if ref() is not None and "layers" in layer]
            most.append((len({layer for layer, _ in alive}), sum(numel for _, numel in alive)))
            return value

        return reading

    for holder in (pretrained.SafetensorsFolder, ModelValues):
        monkeypatch.setattr(holder, "read", watched(holder.read))
    model = patrickstar.from_pretrained(tmp_path)
    assert held == []
    with engine_of(model):
        assert len(most) > 4 * 2 * 4  # 8 sources of gate_up_proj, 4 of down_proj, and what they are made into
    assert max(most) == (1, 4 * 2 * 16 * 32)  # the sources of one gate_up_proj, or the result


def quantized(values, block):
    """FP8 codes and scales; blocks at the edges may be smaller."""
    rows, columns = (-(-size // part) for size, part in zip(values.shape, block, strict=True))
    padded = values.new_zeros(rows * block[0], columns * block[1])
    padded[: values.shape[0], : values.shape[1]] = values
    blocks = padded.view(rows, block[0], columns, block[1])
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
    expected = (codes.float().view(blocks.shape) * scales[:, None, :, None]).view(padded.shape)
    part = (slice(values.shape[0]), slice(values.shape[1]))
    return codes[part].contiguous(), scales, expected[part]


def in_bf16(state):
    return {name: value.bfloat16() for name, value in state.items()}


def save_fp8(folder, block):
    """A DeepSeek-V3 in FP8; returns its dequantised tensors by their names in the file."""
    build("DeepseekV3").bfloat16().save_pretrained(folder)
    stored, expected = {}, {}
    for name, values in load_file(folder / "model.safetensors").items():
        if "_proj" in name and name.endswith(".weight"):
            codes, scales, expected[name] = quantized(values.float(), block)
            stored |= {name: codes, f"{name}_scale_inv": scales}
        else:
            stored[name] = expected[name] = values
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("block", [(8, 8), (12, 20)])
def test_fp8_weights_are_dequantised(tmp_path, block):
    expected = save_fp8(tmp_path / "fp8", block)
    model = patrickstar.from_pretrained(tmp_path / "fp8")
    assert model.dtype == torch.bfloat16
    with engine_of(model) as engine:
        state = in_bf16(engine.state_dict())
        engine.export_weights(tmp_path / "exported", dtype=torch.bfloat16)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    bias = [name for name in exported if name.endswith("e_score_correction_bias")]
    assert [exported[name].dtype for name in bias] == [torch.float32] * 2  # which the model keeps
    assert_same_bits(in_bf16(exported), in_bf16(expected))
    assert "quantization_config" not in json.loads((tmp_path / "exported" / "config.json").read_text())
    if block == (8, 8):  # transformers refuses blocks that are cut off, such as DeepSeek-V3's own
        plain = type(model).from_pretrained(tmp_path / "fp8").state_dict()
        assert_same_bits(state, in_bf16(plain))


def test_refused_fp8_folders(tmp_path):
    save_fp8(tmp_path, (8, 8))
    stored = load_file(tmp_path / "model.safetensors")
    scale = next(name for name in stored if name.endswith("_scale_inv"))
    save_file({**stored, scale: torch.ones(3, 5)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"cannot be dequantised \(.*scales do not fit .* in blocks of \(8, 8\)"):
        patrickstar.from_pretrained(tmp_path)
    del stored[scale]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"cannot be dequantised .*is in F8_E4M3 and has no {scale}"):
        patrickstar.from_pretrained(tmp_path)


class ReadsValues(ConversionOps):
    """Depends on values, which nobody has before they are read."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        (values,) = next(iter(input_dict.values()))
        return {target_patterns[0]: values if values.max().item() < 1e9 else -values}

    @property
    def reverse_op(self):
        return self


@pytest.fixture
def unknown_conversion():
    name = "input_layernorm.weight"
    register_checkpoint_conversion_mapping("qwen3_moe", [WeightConverter(name, name, [ReadsValues()])], overwrite=True)
    yield
    conversion_mapping._checkpoint_conversion_mapping_cache = None


def test_conversions_that_need_values(tmp_path, caplog, unknown_conversion):
    model = build("Qwen3Moe")
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="patrickstar"):
        loaded = patrickstar.from_pretrained(tmp_path)
        assert "transformers loads its weights, in host memory (model.layers.0.input_layernorm" in caplog.text
        with engine_of(loaded) as engine:
            assert_same_bits(dict(engine.state_dict()), dict(model.state_dict()))
            with pytest.raises(ValueError, match="is not read one tensor at a time"):
                load_into(engine.module, tmp_path)
            engine.export_weights(tmp_path / "exported")
        assert "Qwen3MoeForCausalLM is exported under its own names" in caplog.text
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == model.state_dict().keys()


def test_a_checkpoint_is_exported_by_its_configuration(tmp_path, capsys):
    model = build("Qwen3Moe")
    model.save_pretrained(tmp_path / "saved")
    with engine_of(patrickstar.from_pretrained(tmp_path / "saved")) as engine:
        engine.save_checkpoint(tmp_path / "run")
    config = tmp_path / "saved" / "config.json"
    for name, flags in {"known": ["--config", str(config)], "unknown": []}.items():
        assert main(["export", str(tmp_path / "run"), str(tmp_path / name), *flags]) == 0
    known, unknown = (load_file(tmp_path / name / "model.safetensors") for name in ("known", "unknown"))
    assert_same_bits(known, load_file(tmp_path / "saved" / "model.safetensors"))
    assert_same_bits(unknown, dict(model.state_dict()))

"""Mixtures of experts and vision-language models: the engine against plain PyTorch, within two budgets."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.integrations.zoo import (
    DENSE,
    DIVIDED,
    IMPLEMENTATIONS,
    ROUTES,
    STEPS,
    ZOO,
    refusals,
    vision_families,
)
from tests.quant.formulas import dequantized
from tests.ranks.balancing import BIASED, WITH_LOSS, RouterBiases, build_balanced
from tests.ranks.mixed_models import FAMILIES, batch, build
from tests.ranks.ways import SMOOTH_ADAM
from tests.training import make_config

LOSS = 2e-6
"""Largest relative difference of a loss to plain PyTorch's."""
AMPLE, MODERATE = "64MiB", "3MiB"


TIGHT = {"Qwen3_5": "1.5MiB", "Qwen3_5Moe": "1.5MiB", "Qwen3Next": "1.25MiB"}
"""Budgets that make a step with activation checkpointing evict chunks; others: 1 MiB."""


def batches(family):
    """With images and common tokens, without them, with them again."""
    return [batch(family, seed, seed % 2 == 0, seed % 2 == 0) for seed in range(STEPS)]


def generate(family, model):
    prompt = {name: value for name, value in batch(family, 7, True, True).items() if name != "labels"}
    model.eval()
    return model.generate(**prompt, max_new_tokens=2, do_sample=False)


def train_plain(family, experts="eager", make=None):
    torch.manual_seed(0)
    module = (make or build_balanced(family, experts))().train()
    trained = [param for param in module.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, **SMOOTH_ADAM)
    losses = []
    for inputs in batches(family):
        optimizer.zero_grad()
        outputs = module(**inputs, use_cache=False)
        assert (getattr(outputs, "aux_loss", None) is not None) is (make is None and family in WITH_LOSS)
        outputs.loss.backward()
        optimizer.step()
        losses.append(outputs.loss.item())
    return losses, generate(family, module)


def train(family, memory, experts="eager", checkpointing=False, make=None, **options):
    torch.manual_seed(0)
    config = make_config("fp32", default_chunk_size=1024, device_memory=memory, **options)
    config["optimizer"]["params"] = dict(SMOOTH_ADAM)
    engine, optimizer = initialize_engine(make or build_balanced(family, experts), 0, config)
    losses = []
    with engine:
        engine.train()
        if checkpointing:
            engine.module.activation_checkpointing_enable({"use_reentrant": False})
        for inputs in batches(family):
            optimizer.zero_grad()
            loss = engine(**inputs, use_cache=False).loss
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        num_evictions = engine.report()["num_evictions"]
        return (losses, generate(family, engine), engine.state_dict()), num_evictions


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in ZOO else pytest.mark.slow) for f in FAMILIES])
def test_family(family):
    losses, tokens = train_plain(family)
    ample, _ = train(family, AMPLE)
    assert ample[0] == pytest.approx(losses, rel=LOSS)
    assert ample[1].equal(tokens)
    scarce, num_evictions = train(family, TIGHT.get(family, "1MiB"), checkpointing=True)
    assert num_evictions > 0
    assert_same_bits(scarce, ample, family)
    if family in ROUTES:
        for experts in IMPLEMENTATIONS:
            losses, tokens = train_plain(family, experts)
            found, _ = train(family, MODERATE, experts)
            assert found[0] == pytest.approx(losses, rel=LOSS), experts
            assert found[1].equal(tokens), experts


def adapted(family):
    targets = ["q_proj", "v_proj"] if family.startswith("Llama4") else "all-linear"  # its router returns two tensors
    return get_peft_model(build(family)(), LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


def adapted_to_dequantised(family):
    model = adapted(family)
    head = model.get_base_model().get_output_embeddings()
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and "lora" not in name and module is not head:
                module.weight.copy_(dequantized(module.weight, "nf4", torch.float32))
    return model


def check_adapters(family, make_plain, **options):
    losses, tokens = train_plain(family, make=lambda: make_plain(family))
    found, _ = train(family, TIGHT.get(family, "1MiB"), checkpointing=True, make=lambda: adapted(family), **options)
    assert found[0] == pytest.approx(losses, rel=LOSS)
    assert found[1].equal(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*DENSE, *ZOO])
def test_adapters(family):
    check_adapters(family, adapted)


@pytest.mark.parametrize("family", [*DENSE, *ZOO])
def test_adapters_of_quantised_bases(family):
    check_adapters(family, adapted_to_dequantised, quantization={"type": "nf4"})


@pytest.mark.parametrize("family", BIASED)
def test_routers_stay_in_float32_and_keep_their_biases(family, tmp_path):
    """Biases that the loop corrects between steps are saved."""
    config = make_config("bf16", device_memory="1MiB")
    torch.manual_seed(0)
    seen = []
    engine, optimizer = initialize_engine(build(family, "grouped_mm"), 0, config)
    with engine:
        (router, *_) = [module for module in engine.module.modules() if hasattr(module, "e_score_correction_bias")]
        router.register_forward_hook(lambda _module, _inputs, out: seen.append([value.dtype for value in out]))
        biases = RouterBiases(engine.module)
        for inputs in batches(family):
            engine.backward(engine(**inputs, use_cache=False).loss)
            optimizer.step()
            optimizer.zero_grad()
            biases.update()
        assert router.weight.dtype == torch.bfloat16
        assert router.e_score_correction_bias.dtype == torch.float32
        assert router.e_score_correction_bias.any()
        state = engine.state_dict()
        engine.save_checkpoint(tmp_path / "saved")
    assert all(torch.float32 in dtypes and torch.bfloat16 not in dtypes for dtypes in seen) and seen
    with initialize_engine(build(family), 0, config)[0] as other:
        other.load_checkpoint(tmp_path / "saved")
        assert_same_bits(dict(other.state_dict()), dict(state))


@pytest.mark.slow
def test_images_are_not_shared_by_ranks():
    families = vision_families()
    by_rank = run_ranks(2, refusals, families, list(DIVIDED.values()), timeout_seconds=600)
    for ways in by_rank:
        for way, errors in zip(DIVIDED, ways, strict=True):
            for family, error in zip(families, errors, strict=True):
                print(way, family, error)
                said = (
                    f"{family}For",
                    "pixel_values, but only tokens",
                    "linear_attention",
                    "chunked_attention",
                    "over a mesh",
                )
                assert said[0] in error and any(words in error for words in said[1:])

"""Training in FP8 on a GPU: equal bits in every budget, on either side of updates, recomputed, resumed and on ranks."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from patrickstar.activations.selective_recomputation import keep_products
from patrickstar.choices import Fp8Recipe
from patrickstar.config import Fp8Config
from patrickstar.module.fp8_layers import Fp8Layers
from tests.bits import assert_same_bits
from tests.fp8.test_layers import llama, resumed, train
from tests.gpu.test_equality import MIB
from tests.gpu.test_rank_training import run_alike
from tests.models import Case
from tests.ranks.runs import Task
from tests.training import make_host_config

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("recipe", Fp8Recipe)]
LAYERS = 6
wide_llama = functools.partial(llama, hidden_size=768, intermediate_size=1536, num_hidden_layers=LAYERS)
CHUNKS = {"default_chunk_size": 2 * MIB}
SCARCE = 200 * MIB
"""Memory of the device. 36 M parameters have 14 bytes each; libraries' workspaces take 64 MiB."""


def batch(generator):
    tokens = torch.randint(0, 256, (2, 160), generator=generator)  # for two ranks too no multiple of 128
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.usefixtures("deterministic")
def test_bits_do_not_depend_on_memory_sides_and_recomputation(recipe):
    losses, state, report = train(wide_llama, recipe, **CHUNKS)
    assert report["fp8_layers"] == 7 * LAYERS
    assert report["num_device_state_chunks"] == report["num_chunks"]
    plain, _, _ = train(wide_llama, None, **CHUNKS)
    assert losses != plain and losses == pytest.approx(plain, rel=0.01)
    scarce = {"device_memory": SCARCE}
    for changes in (scarce, {"make": make_host_config}, {"checkpointing": True}, {"checkpointing": True, **scarce}):
        found, other, report = train(wide_llama, recipe, **CHUNKS, **changes)
        assert found == losses
        assert_same_bits(other, state)
        assert report["device_peak_bytes"] <= changes.get("device_memory", report["device_peak_bytes"])
        assert report["uploaded_bytes"] > 0 or "checkpointing" in changes


@pytest.mark.usefixtures("deterministic")
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(recipe, tmp_path):
    losses, state, _ = train(wide_llama, recipe, steps=4, **CHUNKS)
    found, last = resumed(wide_llama, recipe, 2, 4, tmp_path, **CHUNKS, device_memory=SCARCE)
    assert found == losses
    assert_same_bits(last, state)


def test_a_recomputation_that_keeps_products_has_equal_bits(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).bfloat16().cuda()
    layers = Fp8Layers(model, Fp8Config(recipe=recipe))
    x, found = torch.randn(3, 100, 512, device="cuda").bfloat16().requires_grad_(), []
    for contexts in (noop_context_fn, keep_products):
        out = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *model.parameters()])])
    layers.restore()
    assert_same_bits(*found)


def test_ranks_have_equal_bits_within_budgets_and_on_either_side(recipe):
    options = {"gradient_clipping": 1.0, "fp8": {"recipe": recipe.value}, **CHUNKS}
    case = Case(wide_llama, batch)
    scarce = Task(case, "bf16", steps=3, on_host=True, options={**options, "device_memory": SCARCE})
    whole, _ = run_alike([Task(case, "bf16", steps=3, options=options), scarce])
    assert whole[0]["report"]["fp8_layers"] == 7 * LAYERS

import os

import pytest
import torch
from torch import nn
from torch.nn import functional

from patrickstar.choices import Fp8Recipe
from patrickstar.config import Fp8Config
from patrickstar.module import expert_rows, fp8_experts, fp8_layers
from patrickstar.module.fp8_layers import Fp8Layers
from patrickstar.module.fused_experts import fuse_experts
from tests.distributed import run_ranks
from tests.fp8.test_layers import fake_quantized, resumed, train

HIDDEN, INTERMEDIATE, EXPERTS = 256, 128, 8


@pytest.fixture(autouse=True)
def _small_layers(monkeypatch):
    small_layers(monkeypatch.setattr)


def small_layers(setter=setattr):
    setter(fp8_layers, "LEAST_NUMEL", 2**14)
    setter(fp8_layers, "LEAST_EXPERT", (1, 1))
    setter(fp8_experts, "LEAST_ROWS", 1)


def configuration(**changes):
    from transformers import Qwen3MoeConfig

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 256, "use_cache": False}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INTERMEDIATE}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    return Qwen3MoeConfig(**{**sizes, **experts, **heads, **changes})


def mixture(**changes):
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(configuration(**changes))


def make_experts(num_experts=EXPERTS, chosen=2, **changes):
    """Experts alone, with a linear layer that multiplies in 8 bits."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": HIDDEN, "num_experts": num_experts, "num_experts_per_tok": chosen}
    config = configuration(**{**sizes, **changes})
    config._experts_implementation = "grouped_mm"
    experts = Qwen3MoeExperts(config)
    for param in experts.parameters():
        nn.init.normal_(param, std=0.05)
    model = nn.ModuleDict({"experts": experts.bfloat16(), "linear": nn.Linear(256, 256, dtype=torch.bfloat16)})
    fuse_experts(model)
    return model


def by_hand(rows, up, down, grad):
    """An expert's result and gradients, with blocks that are quantized independently."""

    def lines(x, dim=1):
        return fake_quantized(x, Fp8Recipe.ROWWISE, dim)

    gate_up = functional.linear(lines(rows), lines(up)).bfloat16()
    gated = expert_rows.swiglu(gate_up)
    out = functional.linear(lines(gated), lines(down)).bfloat16()
    of_gated = (lines(grad) @ lines(down, 0)).bfloat16()
    of_gate_up = expert_rows.swiglu_backward(gate_up, of_gated)
    return (
        out,
        (lines(of_gate_up) @ lines(up, 0)).bfloat16(),
        (lines(lines(of_gate_up), 0).t() @ lines(lines(rows), 0)).bfloat16(),
        (lines(lines(grad), 0).t() @ lines(lines(gated), 0)).bfloat16(),
    )


def test_experts_compute_the_products_of_the_recipe():
    torch.manual_seed(0)
    model = make_experts()
    experts, changed = model.experts, Fp8Layers(model, Fp8Config())
    hidden = torch.randn(300, HIDDEN).bfloat16().requires_grad_()
    chosen = torch.randint(0, EXPERTS - 1, (300, 1))  # the last expert gets no token
    direction = torch.randn(300, HIDDEN).bfloat16()
    weights = torch.rand(300, 1, requires_grad=True)
    out = experts(hidden, chosen, weights)
    of_hidden, of_weights, of_up, of_down = torch.autograd.grad(
        out, [hidden, weights, experts.gate_up_proj, experts.down_proj], direction
    )
    changed.restore()
    assert not of_up[-1].any() and not of_down[-1].any()
    close = {"rtol": 2**-6, "atol": 2e-2}
    for expert in range(EXPERTS - 1):
        mine = (chosen == expert).flatten()
        grad = (weights[mine] * direction[mine].float()).bfloat16()
        found, of_rows, up, down = by_hand(
            hidden[mine].detach(), experts.gate_up_proj[expert].detach(), experts.down_proj[expert].detach(), grad
        )
        torch.testing.assert_close(out[mine], (weights[mine] * found).bfloat16(), **close)
        torch.testing.assert_close(of_hidden[mine], of_rows, **close)
        torch.testing.assert_close(of_up[expert], up, **close)
        torch.testing.assert_close(of_down[expert], down, **close)
        dots = (found.float() * direction[mine].float()).sum(1, keepdim=True)
        torch.testing.assert_close(of_weights[mine], dots, rtol=2**-5, atol=0.1)


def results(experts, hidden, chosen, weights):
    trained = [param for param in experts.parameters() if param.requires_grad]
    out = experts(hidden, chosen, weights)
    return [out, *torch.autograd.grad(out, [hidden, weights, *trained], torch.ones_like(out))]


def arguments(num_tokens=200, chosen=2):
    hidden = torch.randn(num_tokens, HIDDEN).bfloat16().requires_grad_()
    index = torch.stack([torch.randperm(EXPERTS)[:chosen] for _ in range(num_tokens)])
    return hidden, index, torch.rand(num_tokens, chosen, requires_grad=True)


def test_compiled_experts_have_the_bits_of_eager_ones():
    torch.manual_seed(0)
    model, given = make_experts(), arguments()
    changed = Fp8Layers(model, Fp8Config())
    eager = results(model.experts, *given)
    compiled = torch.compile(lambda *tensors: model.experts(*tensors), backend="aot_eager")
    out = compiled(*given)
    found = [
        out,
        *torch.autograd.grad(out, [given[0], given[2], *model.experts.parameters()], torch.ones_like(out)),
    ]
    changed.restore()
    assert all(one.equal(other) for one, other in zip(eager, found, strict=True))


def test_frozen_experts_have_the_same_gradients_of_tokens():
    torch.manual_seed(0)
    model, given = make_experts(), arguments()
    changed = Fp8Layers(model, Fp8Config())
    whole = results(model.experts, *given)
    model.experts.requires_grad_(False)
    frozen = results(model.experts, *given)
    changed.restore()
    assert all(one.equal(other) for one, other in zip(whole[:3], frozen, strict=True))


def test_few_rows_and_other_dtypes_are_computed_as_before(monkeypatch):
    torch.manual_seed(0)
    model, given = make_experts(), arguments()
    before = results(model.experts, *given)
    monkeypatch.setattr(fp8_experts, "LEAST_ROWS", 51)  # 400 rows of 8 experts
    changed = Fp8Layers(model, Fp8Config())
    few = results(model.experts, *given)
    monkeypatch.setattr(fp8_experts, "LEAST_ROWS", 50)
    many = results(model.experts, *given)
    changed.restore()
    monkeypatch.setattr(fp8_experts, "LEAST_ROWS", 1)
    assert all(one.equal(other) for one, other in zip(before, few, strict=True))
    assert not before[0].equal(many[0])
    assert before[0].equal(model.experts(*given)) and "fp8_recipe" not in vars(model.experts)
    wide = model.float()
    changed = Fp8Layers(wide, Fp8Config())
    assert wide.experts(given[0].float(), *given[1:]).dtype is torch.float32
    changed.restore()


def test_what_is_not_finite_reaches_its_token_alone():
    torch.manual_seed(0)
    model, (hidden, chosen, weights) = make_experts(), arguments()
    changed = Fp8Layers(model, Fp8Config())
    with torch.no_grad():
        hidden[7, 3] = torch.inf
    out, _, _, of_up, _ = results(model.experts, hidden, chosen, weights)
    changed.restore()
    assert out.isfinite().all(1).logical_not().nonzero().flatten().tolist() == [7]
    assert of_up.isfinite().flatten(1).all(1).logical_not().nonzero().flatten().tolist() == sorted(chosen[7].tolist())


def gpt_oss():
    from tests.ranks.mixed_models import build

    return build("GptOss", "grouped_mm")()


@pytest.mark.parametrize(
    ("build", "section", "reason"),
    [
        (make_experts, {"recipe": "block"}, 'with the recipe "rowwise" alone'),
        (make_experts, {"skip_modules": ["experts"]}, "fp8.skip_modules"),
        (lambda: make_experts(moe_intermediate_size=96), {}, "192 x 256 is not made of blocks of 128 x 128"),
        (lambda: make_experts(num_experts=1024, moe_intermediate_size=128, hidden_size=128), {}, "1024 experts"),
        (lambda: nn.ModuleDict({"experts": gpt_oss(), "linear": nn.Linear(256, 256)}), {}, "more than two products"),
    ],
)
def test_other_experts_multiply_in_16_bits_with_the_reason(build, section, reason):
    with torch.device("meta"):
        model = build()
    fuse_experts(model)
    changed = Fp8Layers(model, Fp8Config(**section))
    reasons = {name: text for name, text in changed.left_out.items() if name.rpartition(".")[2] == "experts"}
    assert changed.num_experts == 0 and reasons and all(reason in text for text in reasons.values())
    changed.restore()


def test_experts_that_are_not_fused_and_gpus_that_cannot_are_named():
    model = make_experts()
    for section, expected in (("grouped_mm", "experts, for a reason"), ("eager", "experts that are not fused")):
        if section == "eager":
            model.experts.config._experts_implementation_internal = section
        changed = Fp8Layers(model, Fp8Config(), "experts, for a reason")
        assert changed.left_out["experts"] == expected
        changed.restore()


def test_report_and_start_line_count_experts(caplog):
    caplog.set_level("INFO", "patrickstar")
    _, _, report = train(mixture, Fp8Recipe.ROWWISE, steps=1)
    linear, experts = 2 * 4 * 128 * 128, 2 * 2 * 3 * 128 * INTERMEDIATE  # two of eight experts
    routers, head = 2 * EXPERTS * 128, 128 * 256
    assert report["fp8_layers"] == 8 and report["fp8_experts"] == 2
    assert not any("experts" in name for name in report["fp8_left_out"])
    named = sum("router" in reason or "gate" in name for name, reason in report["fp8_left_out"].items())
    others = head + (routers if named else 0)
    assert report["fp8_share"] == pytest.approx((linear + experts) / (linear + experts + others))
    assert "8 linear layers and 2 layers' experts with" in caplog.text


def test_bits_do_not_depend_on_budgets_and_recomputation():
    losses, state, _ = train(mixture, Fp8Recipe.ROWWISE)
    plain, _, _ = train(mixture, None)
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.01)
    for changes in ({"device_memory": "8MiB"}, {"checkpointing": True, "device_memory": "8MiB"}):
        others, other_state, _ = train(mixture, Fp8Recipe.ROWWISE, **changes)
        assert others == losses
        assert all(other_state[name].equal(state[name]) for name in state)


def on_rank():
    small_layers()
    rank, found = int(os.environ["RANK"]), []
    for section in ({}, {"expert_parallel": {"size": 2}}):
        for changes in ({}, {"device_memory": "8MiB"}):
            found.append(train(mixture, Fp8Recipe.ROWWISE, steps=2, rank=rank, **section, **changes)[:2])
    return found


def test_two_ranks_have_equal_bits_within_budgets():
    ranks = run_ranks(2, on_rank)
    for whole, within in (pair for found in ranks for pair in (found[:2], found[2:])):
        assert whole[0] == within[0]
        assert all(value.equal(within[1][name]) for name, value in whole[1].items())
    for one, other in zip(*ranks, strict=True):
        assert all(value.equal(other[1][name]) for name, value in one[1].items())
    for found in ranks:
        assert found[2][0] != found[0][0] and found[2][0] == pytest.approx(found[0][0], rel=0.01)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path):
    losses, state, _ = train(mixture, Fp8Recipe.ROWWISE, steps=3)
    found, last = resumed(mixture, Fp8Recipe.ROWWISE, 2, 3, tmp_path)
    assert found == losses
    assert all(last[name].equal(state[name]) for name in state)


def test_small_experts_multiply_in_16_bits_with_the_reason(monkeypatch):
    monkeypatch.setattr(fp8_layers, "LEAST_EXPERT", (HIDDEN, INTERMEDIATE + 1))
    changed = Fp8Layers(make_experts(), Fp8Config())
    reason = "experts of 256 x 128 elements, which are faster in bfloat16 below 256 x 129"
    assert changed.num_experts == 0 and changed.left_out["experts"] == reason


@pytest.mark.parametrize(("factor", "reason"), [(1.01, None), (1.1, "differ by 0.1"), (float("nan"), "differ by inf")])
def test_a_gpu_whose_kernels_give_other_values_keeps_experts_in_16_bits(monkeypatch, factor, reason):
    expected = fp8_experts.trial(torch.device("cpu"))
    assert all(value.isfinite().all() and value.any() for value in expected)
    assert not expected[3][1].any() and expected[3][0].any()  # expert 1 has no rows

    def tried(device):
        return [*expected[:-1], expected[-1] * (factor if device.type == "cuda" else 1.0)]

    monkeypatch.setattr(fp8_experts, "trial", tried)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = fp8_experts.exclusion_of_experts.__wrapped__(torch.device("cuda", 0))
    assert found is None if reason is None else reason in found

import copy

import pytest
import torch

from patrickstar.module import expert_rows
from patrickstar.module.expert_rows import Routing
from patrickstar.module.fused_experts import IMPLEMENTATION, fuse_experts, is_clamped, is_plain_swiglu
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.experts import HIDDEN, INTERMEDIATE, errors, gpt_oss_experts, qwen_experts, routed
from tests.ranks.mixed_models import batch, build
from tests.training import make_config

SWIGLU, BIASED, SHARED = "Qwen3Moe", "GptOss", "DeepseekV3"


def with_gradients(model, given):
    loss = model(**given).loss
    loss.backward()
    return loss.item(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("family", [SWIGLU, BIASED, SHARED, "Mixtral", "Jamba", "Qwen3VLMoe"])
def test_a_fused_model_equals_grouped_mm(family):
    torch.manual_seed(0)
    model = build(family, "grouped_mm")()
    fused_model = copy.deepcopy(model)
    fused = fuse_experts(fused_model)
    assert fused.names
    given = batch(family, 1, True, True)
    loss, gradients = with_gradients(model, given)
    fused_loss, fused_gradients = with_gradients(fused_model, given)
    assert fused_loss == loss
    assert gradients.keys() == fused_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused_gradients[name], gradient, rtol=1e-5, atol=1e-7)
    fused.restore()
    assert all(fused_model.get_submodule(name).config._experts_implementation == "grouped_mm" for name in fused.names)


MAKERS = [qwen_experts, gpt_oss_experts]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_experts_are_at_least_as_accurate_as_transformers(make, dtype):
    torch.manual_seed(0)
    for name, eager, grouped, fused in errors(make(), "cpu", dtype, 200):
        print(f"{name}: error {eager:.3g} eager, {grouped:.3g} with grouped_mm, {fused:.3g} fused")
        assert fused <= 1.05 * min(eager, grouped) + 1e-6


def outputs_and_gradients(call, experts, dtype):
    index, weights = routed(40)
    hidden, weights = torch.randn(40, HIDDEN).to(dtype).requires_grad_(), weights.requires_grad_()
    out = call(hidden, index, weights)
    trained = [param for param in experts.parameters() if param.requires_grad]
    return [out, *torch.autograd.grad(out, [hidden, weights, *trained], torch.ones_like(out))]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_and_frozen_experts_have_the_same_bits(make, dtype):
    experts = make().to(dtype)
    fuse_experts(experts)
    assert is_plain_swiglu(experts) != is_clamped(experts)
    found = []
    for call, trained in ((experts, True), (torch.compile(experts, backend="aot_eager"), True), (experts, False)):
        torch.manual_seed(0)
        experts.requires_grad_(trained)
        found.append(outputs_and_gradients(call, experts, dtype))
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0][:3])


def test_swiglu_experts_keep_their_tokens_and_the_first_products_results():
    experts, kept = qwen_experts(), []
    fuse_experts(experts)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda it: it):
        outputs_and_gradients(experts, experts, torch.float32)
    rows = sorted(shape for shape in kept if shape[0] == 120 and len(shape) == 2)
    assert rows == [(120, HIDDEN), (120, 2 * INTERMEDIATE)]


@pytest.mark.parametrize("family", [SWIGLU, BIASED])
def test_budgets_and_recomputation_change_no_bit(family):
    results = []
    for settings in ({"device_memory": "64MiB"}, {"device_memory": "300KiB", "default_chunk_size": 1024}):
        for recomputes in (False, True):
            torch.manual_seed(0)
            model = build(family, "grouped_mm")()
            if recomputes:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            engine, optimizer = initialize_engine(lambda model=model: model, 0, make_config("bf16", **settings))
            with engine:
                losses = []
                for index in range(2):
                    optimizer.zero_grad()
                    loss = engine(**batch(family, index, True, False), use_cache=False).loss
                    engine.backward(loss)
                    optimizer.step()
                    losses.append(loss.item())
                results.append([losses, engine.state_dict()])
                evictions = engine.report()["num_evictions"]
    assert evictions > 0
    for found in results[1:]:
        assert_same_bits(found, results[0])


def implementations(model):
    """The implementations of the model and of its experts."""
    experts = [module for module in model.modules() if hasattr(module, "down_proj") and hasattr(module, "num_experts")]
    return model.config._experts_implementation, {module.config._experts_implementation for module in experts}


def test_models_that_share_a_configuration_are_fused_apart():
    model = build(SWIGLU, "grouped_mm")()
    other = type(model)(model.config)
    fused = fuse_experts(model)
    assert implementations(model) == ("grouped_mm", {IMPLEMENTATION})
    assert implementations(other) == ("grouped_mm", {"grouped_mm"})
    others = fuse_experts(other)
    fused.restore()
    assert implementations(other) == ("grouped_mm", {IMPLEMENTATION})
    others.restore()
    assert implementations(other) == implementations(model) == ("grouped_mm", {"grouped_mm"})


def test_other_experts_are_left_alone():
    model = build(SWIGLU, "eager")()
    assert fuse_experts(model).names == []
    assert model.config._experts_implementation == "eager"


@pytest.mark.parametrize(("section", "expected"), [({}, IMPLEMENTATION), ({"experts": "model"}, "grouped_mm")])
def test_an_engine_fuses_experts_until_it_closes(section, expected):
    config = make_config("fp32", device_memory="64MiB", activations=section)
    engine, optimizer = initialize_engine(build(SWIGLU, "grouped_mm"), 0, config)
    model = engine.module
    with engine:
        assert implementations(model) == ("grouped_mm", {expected})
        engine.backward(engine(**batch(SWIGLU, 1, True, False)).loss)
        optimizer.step()
        copied, given = copy.deepcopy(model), batch(SWIGLU, 1, True, False)
        with torch.no_grad():
            assert copied(**given).loss.item() == engine(**given).loss.item()
    assert implementations(model) == ("grouped_mm", {"grouped_mm"})


def test_another_implementation_can_be_chosen_later():
    torch.manual_seed(0)
    model = build(SWIGLU, "grouped_mm")()
    given = batch(SWIGLU, 1, True, False)
    losses = {}
    for name in ("eager", "batched_mm"):
        plain = copy.deepcopy(model)
        plain.set_experts_implementation(name)
        losses[name] = plain(**given).loss.item()
    fuse_experts(model)
    for name, loss in losses.items():
        model.set_experts_implementation(name)
        assert model(**given).loss.item() == loss


def plain_rows(hidden, chosen, weights, scales, biases, num_experts):
    """The weighted sum by loops over tokens.

    Expert ``e`` multiplies by ``scales[e]`` and adds ``biases[e]``, and others are absent.
    """
    out = []
    for token in range(hidden.size(0)):
        parts = [
            weights[token, k] * (hidden[token] * scales[expert] + biases[expert])
            for k, expert in enumerate(chosen[token].tolist())
            if expert < num_experts
        ]
        out.append(sum(parts, torch.zeros_like(hidden[token])))
    return torch.stack(out)


@pytest.mark.parametrize("num_absent", [0, 2])
def test_rows_are_gathered_and_summed(num_absent):
    """Experts of other ranks have indices beyond the last one here."""
    generator = torch.Generator().manual_seed(0)
    num_experts = 4
    chosen = torch.stack([torch.randperm(num_experts + num_absent, generator=generator)[:3] for _ in range(7)])
    scales = torch.randn(num_experts, 1, generator=generator)
    biases = torch.randn(num_experts, 10, generator=generator, requires_grad=True)
    hidden = torch.randn(7, 10, generator=generator, requires_grad=True)
    weights = torch.rand(7, 3, generator=generator, requires_grad=True)
    wanted = plain_rows(hidden, chosen, weights, scales, biases, num_experts)
    direction = torch.randn(wanted.shape, generator=generator)
    of_plain = torch.autograd.grad(wanted, (hidden, weights, biases), direction)

    routing = Routing.of(chosen.int(), num_experts)
    assert routing.experts.dtype is torch.int64  # kernels read that
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)[:num_experts]
    assert routing.offsets.tolist() == counts.cumsum(0).tolist()
    rows = expert_rows.dispatch(hidden, routing.order, routing.positions)
    rows = rows * torch.nn.functional.pad(scales, (0, 0, 0, num_absent), value=torch.nan)[routing.experts]
    out = expert_rows.combine(rows, weights, routing, bias=biases)
    torch.testing.assert_close(out, wanted)
    for found, expected in zip(torch.autograd.grad(out, (hidden, weights, biases), direction), of_plain, strict=True):
        torch.testing.assert_close(found, expected)


def test_the_gate_is_swiglu():
    rows = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(expert_rows.gate, (rows,))
    half, up = rows.chunk(2, dim=-1)
    assert expert_rows.gate(rows).equal(torch.nn.functional.silu(half) * up)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_experts_values_are_sums_over_their_rows(dtype):
    """An expert without rows has none, and rows of other ranks' experts may hold anything."""
    generator = torch.Generator().manual_seed(0)
    experts, offsets = torch.tensor([0] * 600 + [2] * 3 + [2] * 2), torch.tensor([600, 600, 603], dtype=torch.int32)
    values = torch.randn(3, 8, generator=generator).to(dtype).requires_grad_()
    rows = expert_rows.by_row(values, experts, offsets)
    assert rows.equal(values[experts])
    direction = torch.rand(rows.shape, generator=generator).to(dtype)
    direction[603:] = torch.nan
    (found,) = torch.autograd.grad(rows, values, direction)
    wanted = torch.stack([direction[:600].double().sum(0), torch.zeros(8), direction[600:603].double().sum(0)])
    torch.testing.assert_close(found, wanted.to(dtype))
    torch.library.opcheck(expert_rows.sum_groups, (direction, offsets))


def test_second_derivatives_are_refused():
    """PyTorch's once_differentiable would give a gradient without a graph: that of the sum depends on nothing."""
    rows = torch.randn(5, 12).requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True, but fused experts have no second derivative; set"):
        torch.autograd.grad(expert_rows.gate(rows).sum(), rows, create_graph=True)


def test_operators_describe_themselves():
    """``torch.compile`` and the meta device use these descriptions."""
    rows, positions = torch.randn(6, 8), torch.tensor([[0, 3], [1, 4], [2, -1]])
    torch.library.opcheck(expert_rows.sum_rows, (rows, positions, torch.rand(3, 2)))
    tokens = torch.tensor([0, 1, 2, 0, 1, 2])
    torch.library.opcheck(expert_rows.scale_rows, (torch.randn(3, 8), rows, tokens, torch.rand(6)))
    bias = torch.randn(2, 8), torch.tensor([0, 0, 0, 1, 1, 2])
    torch.library.opcheck(expert_rows.sum_rows, (rows, positions, torch.rand(3, 2), *bias))
    torch.library.opcheck(expert_rows.scale_rows, (torch.randn(3, 8), rows, tokens, torch.rand(6), *bias))
    torch.library.opcheck(expert_rows.swiglu, (rows,))
    torch.library.opcheck(expert_rows.swiglu_backward, (rows, torch.randn(6, 4)))

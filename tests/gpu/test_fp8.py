import pytest
import torch
from torch import nn

from patrickstar.choices import Fp8Recipe
from patrickstar.config import Fp8Config
from patrickstar.fp8.casting import Block, Format, Sides, cast
from patrickstar.fp8.grouped import (
    Groups,
    cast_rows,
    cast_turned_weights,
    cast_weights,
    multiply,
    multiply_columns,
    turn,
)
from patrickstar.fp8.linear import RECIPES, fp8_class
from patrickstar.fp8.products import Sum, product
from patrickstar.module import expert_rows, fp8_experts
from patrickstar.module.fp8_layers import Fp8Layers
from tests.fp8.test_experts import make_experts, small_layers

pytestmark = pytest.mark.gpu


def matrix(rows, columns, seed=0):
    """Values of many magnitudes, with zeros, subnormal numbers, ties, and blocks that are zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-20, 20, (rows, 1), generator=generator)
    x[torch.rand(rows, columns, generator=generator) < 0.1] = 0.0
    x[:, :128] = 0.0
    x[0, 0], x[1, 1], x[2, 2] = 1e-40, -0.0, 448.0
    x[3, 3], x[4, 4] = 449.0, torch.finfo(torch.bfloat16).max
    return x.bfloat16()


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("block", Block)
@pytest.mark.parametrize("rows", [128, 300, 1000])
def test_casts_have_the_bits_of_the_cpu(rows, block, format):
    x = matrix(rows, 512)
    for sides in (Sides.PLAIN, Sides.TRANSPOSED, Sides.BOTH):
        for here, there in zip(cast(x, block, sides, format), cast(x.cuda(), block, sides, format), strict=True):
            assert (here is None) == (there is None)
            if here is not None:
                assert there.values.cpu().view(torch.uint8).equal(here.values.view(torch.uint8))
                assert there.scales.cpu().equal(here.scales)


@pytest.mark.parametrize("block", Block)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_makes_its_block_nan(block, bad):
    x = torch.ones(256, 256, dtype=torch.bfloat16)
    x[130, 7] = bad
    for device in ("cpu", "cuda"):
        plain, turned = cast(x.to(device), block, Sides.BOTH)
        assert plain.dequantized()[130, 7].isnan() and turned.dequantized()[7, 130].isnan()
        ones = cast(torch.ones(128, 256, dtype=torch.bfloat16, device=device), block, Sides.PLAIN)[0]
        assert product(plain, ones, 256)[130].isnan().all()


@pytest.mark.parametrize("recipe", Fp8Recipe)
@pytest.mark.parametrize("shape", [(300, 512, 384), (1024, 384, 640), (4096, 1024, 2048)])
def test_products_are_those_of_the_same_values(recipe, shape):
    rows, summed, columns = shape
    chosen = RECIPES[recipe]
    x, w = torch.randn(rows, summed).bfloat16().cuda(), torch.randn(columns, summed).bfloat16().cuda()
    a, a_turned = cast(x, chosen.inputs, Sides.BOTH)
    for b in (cast(w, chosen.weights, Sides.PLAIN)[0], cast(w.t(), chosen.weights, Sides.TRANSPOSED)[1]):
        exact = a.dequantized().double()[:rows] @ b.dequantized().double().t()
        for sum, bound in ((Sum.EXACT, 0.003), (chosen.forward_sum, 0.01)):
            found = product(a, b, rows, sum)
            error = ((found.double() - exact).norm() / exact.norm()).item()
            print(f"{recipe.value} {shape} {sum.name}: {error:.2g}")
            assert found.shape == exact.shape and error < bound
    g_turned = cast(
        torch.randn(rows, columns).bfloat16().cuda(), chosen.gradients, Sides.TRANSPOSED, chosen.gradient_format
    )[1]
    exact = g_turned.dequantized().double() @ a_turned.dequantized().double().t()
    found = product(g_turned, a_turned, columns)
    assert ((found.double() - exact).norm() / exact.norm()).item() < 0.003


def trained(layer, x, direction):
    x = x.clone().requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], direction)]


@pytest.mark.parametrize("recipe", Fp8Recipe)
def test_compiled_layers_give_the_bits_of_eager_ones_and_the_cpus_within_rounding(recipe):
    torch.manual_seed(0)
    layer = nn.Linear(512, 1024, dtype=torch.bfloat16)
    layer.fp8_recipe, layer.__class__ = RECIPES[recipe], fp8_class(nn.Linear)
    x, direction = torch.randn(2, 200, 512).bfloat16(), torch.randn(2, 200, 1024).bfloat16()
    on_host = trained(layer, x, direction)
    layer, x, direction = layer.cuda(), x.cuda(), direction.cuda()
    eager = trained(layer, x, direction)
    for found, expected in zip(eager, on_host, strict=True):
        assert ((found.cpu().double() - expected.double()).norm() / expected.double().norm()).item() < 0.01
    for found, expected in zip(trained(torch.compile(layer, fullgraph=True), x, direction), eager, strict=True):
        assert found.equal(expected)


def test_this_gpu_multiplies_experts_if_it_is_hopper():
    reason = fp8_experts.exclusion_of_experts(torch.device("cuda", torch.cuda.current_device()))
    assert (reason is None) == (torch.cuda.get_device_capability() == (9, 0)), reason


def groups_on(device, ends):
    ends = torch.tensor(ends, dtype=torch.int32, device=device)
    return Groups.of(ends, int(ends[-1]))


def bits(values, columns=None):
    return values[..., :columns].cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("ends", [[0, 7, 7, 200, 201, 475], [475], [0, 0, 1], [128, 256, 1280]])
def test_grouped_casts_have_the_bits_of_the_cpu(ends):
    x = matrix(ends[-1] + 5, 384).clamp(-1e38, 1e38)  # codes of larger ones may stand for infinity
    here, there = groups_on("cpu", ends), groups_on("cuda", ends)
    assert there.padded_ends.tolist() == here.padded_ends.tolist()
    last = int(here.padded_ends[-1])
    rows, on_gpu = cast_rows(x), cast_rows(x.cuda())
    assert bits(on_gpu.values).equal(bits(rows.values)) and on_gpu.scales.cpu().equal(rows.scales)
    sources = torch.randint(len(x), (ends[-1],), generator=torch.Generator().manual_seed(1))
    for index in (None, sources):
        columns, found = turn(rows, here, index), turn(on_gpu, there, None if index is None else index.cuda())
        assert bits(found.values, last).equal(bits(columns.values, last)) and found.scales.cpu().equal(columns.scales)
    weights = matrix(3 * 256, 256).view(3, 256, 256)
    for cast_them in (cast_weights, cast_turned_weights):
        wanted, found = cast_them(weights), cast_them(weights.cuda())
        assert bits(found.values).equal(bits(wanted.values)) and found.scales.cpu().equal(wanted.scales)


@pytest.mark.parametrize("width", [128, 768, 3072])  # a lane keeps up to 2,048 columns of its row
def test_fused_casts_have_the_bits_of_kernels_one_after_the_other(width):
    torch.manual_seed(0)
    gate_up, gated_grad = (torch.randn(301, size, device="cuda").bfloat16() * 4 for size in (2 * width, width))
    grad, rows = torch.randn(50, width, device="cuda").bfloat16(), torch.randn(301, width, device="cuda").bfloat16()
    tokens, weights = torch.randint(50, (301,), device="cuda"), torch.rand(301, device="cuda")
    grad_rows, grad_weights = expert_rows.scale_rows(grad, rows, tokens, weights)
    weighted, found_weights = fp8_experts._cast_weighted(grad, rows, tokens, weights)
    for found, wanted in (
        (fp8_experts._cast_swiglu(gate_up), expert_rows.swiglu(gate_up)),
        (
            fp8_experts._cast_swiglu_gradient(gate_up, gated_grad),
            expert_rows.swiglu_backward(gate_up, gated_grad),
        ),
        (weighted, grad_rows),
    ):
        codes = cast_rows(wanted)
        assert bits(found.values).equal(bits(codes.values)) and found.scales.equal(codes.scales)
    assert found_weights.equal(grad_weights)


@pytest.mark.parametrize(
    ("ends", "summed", "results"),
    [
        ([0, 7, 7, 200, 201, 475], 256, 384),
        ([1000, 1000, 3001, 4097], 768, 2048),
        ([5000, 9000], 2048, 2048),  # tiles of PyTorch's kernel depend on sizes
        (list(range(33, 33 * 129, 33)), 256, 128),
    ],
)
def test_grouped_products_are_those_of_the_same_values(ends, summed, results):
    torch.manual_seed(0)
    groups = groups_on("cuda", ends)
    x, grad = (torch.randn(ends[-1], size, device="cuda").bfloat16() for size in (summed, results))
    weights = torch.randn(len(ends), results, summed, device="cuda").bfloat16()
    rows, grads = cast_rows(x), cast_rows(grad)
    plain, turned = cast_weights(weights), cast_turned_weights(weights)
    x_columns, grad_columns = turn(rows, groups), turn(grads, groups)
    products = [
        (multiply(rows, plain, groups, Sum.FAST), rows, plain, 0.01),
        (multiply(rows, plain, groups), rows, plain, 0.003),
        (multiply(grads, turned, groups), grads, turned, 0.003),
    ]
    sums = multiply_columns(grad_columns, x_columns, groups)
    padded = [0, *groups.padded_ends.tolist()]
    for group, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        mine, columns = slice(begin, end), slice(*padded[group : group + 2])
        for found, codes, matrices, bound in products:
            matrix = matrices.values[group].double() * matrices.scales[group].double().unsqueeze(1)
            exact = codes.values[mine].double() * codes.scales[mine].double().unsqueeze(1) @ matrix.t()
            assert (found[mine].double() - exact).norm() <= bound * exact.norm()
        a, b = (
            codes.values[:, columns].double() * codes.scales[group].double().unsqueeze(1)
            for codes in (grad_columns, x_columns)
        )
        exact = a @ b.t()
        assert (sums[group].double() - exact).norm() <= 0.003 * exact.norm()


def test_experts_give_equal_bits_again_and_the_cpus_within_rounding(monkeypatch):
    small_layers(monkeypatch.setattr)
    torch.manual_seed(0)
    model = make_experts()
    changed = Fp8Layers(model, Fp8Config())
    hidden, weights = torch.randn(500, 256).bfloat16(), torch.rand(500, 2)
    chosen = torch.randint(0, 7, (500, 2))  # the last expert gets no token
    direction = torch.randn(500, 256).bfloat16()

    def run(experts, *given):
        hidden, chosen, weights, direction = (each.clone() for each in given)
        hidden.requires_grad_()
        weights.requires_grad_()
        out = experts(hidden, chosen, weights)
        return [out, *torch.autograd.grad(out, [hidden, weights, *model.parameters()], direction, allow_unused=True)]

    given = [hidden, chosen, weights, direction]
    on_host = run(model.experts, *given)
    model.cuda()
    given = [each.cuda() for each in given]
    eager = run(model.experts, *given)
    compiled = run(torch.compile(model.experts), *given)  # PyTorch may choose another kernel for products
    for others, bound in ((on_host, 0.02), (compiled, 0.01)):
        for found, expected in zip(eager, others, strict=True):
            if expected is not None:
                expected = expected.double().cpu()
                assert ((found.cpu().double() - expected).norm() / expected.norm()).item() < bound
    again = run(model.experts, *given)
    assert all(one is None or one.equal(other) for one, other in zip(eager, again, strict=True))
    changed.restore()

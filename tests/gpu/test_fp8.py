import pytest
import torch
from torch import nn

from patrickstar.choices import Fp8Recipe
from patrickstar.fp8.casting import Block, Format, Sides, cast
from patrickstar.fp8.linear import RECIPES, fp8_class
from patrickstar.fp8.products import Sum, product

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

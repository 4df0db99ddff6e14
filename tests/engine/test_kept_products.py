"""Products that checkpoints keep (``keep_products``), without an engine."""

import functools

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from patrickstar.activations.selective_recomputation import ComparedProducts, NeededProducts, keep_products
from tests.bits import assert_same_bits


def test_products_that_no_recomputation_asks_for_are_not_kept():
    first, second = torch.randn(2, 8, 8).unbind()
    made = []

    def call(hidden, squares):
        product = (hidden @ first).relu() @ second
        made.append(StorageWeakRef(product.untyped_storage()))
        return (product * product if squares else product).sum()

    needed = NeededProducts()
    contexts = functools.partial(keep_products, needed)
    # The sum saves nothing, so its recomputation ends before the second product; the square saves it.
    for squares, is_kept, most in [(False, True, 1), (False, False, 1), (True, False, 2), (True, True, 2)]:
        hidden = torch.randn(8, 8, requires_grad=True)
        made.clear()
        loss = checkpoint(call, hidden, squares, use_reentrant=False, context_fn=contexts)
        assert made[0].expired() is not is_kept
        (grad,) = torch.autograd.grad(loss, hidden)
        assert_same_bits(grad, torch.autograd.grad(call(hidden, squares), hidden)[0])
        assert needed.most == most


@pytest.mark.parametrize("contexts", [keep_products, ComparedProducts().contexts])
def test_compiled_functions_stay_compiled(contexts):
    torch._dynamo.reset()
    num_runs = 0

    def backend(graph, _):
        def run(*args):
            nonlocal num_runs
            num_runs += 1
            return graph(*args)

        return run

    compiled = torch.compile(lambda hidden, weight: (hidden @ weight).relu(), backend=backend)
    hidden, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    for number in (1, 2):  # the first compiles
        checkpoint(compiled, hidden, weight, use_reentrant=False, context_fn=contexts).sum().backward()
        assert num_runs == 2 * number
    twice = weight.grad.clone()
    weight.grad = None
    (hidden @ weight).relu().sum().backward()
    assert torch.equal(twice, 2 * weight.grad)


class Overwritten(nn.Module):
    """Writes into a product with code that PyTorch does not see."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden):
        product = self.linear(hidden)
        product.detach().numpy()[:] *= 2
        return product.sin()


class Random(nn.Linear):
    """Its product is another one each time, also in a recomputation."""

    def forward(self, hidden):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(hidden * self.calls).sin()


def test_products_that_change_are_found_out():
    in_place = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
    for module, differs in ((in_place, False), (Overwritten(), True), (Random(8, 8), True)):
        proof = ComparedProducts()
        hidden = torch.randn(4, 8, requires_grad=True)
        for _ in range(2):
            hidden = checkpoint(module, hidden, use_reentrant=False, context_fn=proof.contexts)
        hidden.sum().backward()
        assert proof.differs == differs

import collections
import queue
import threading

import pytest
import torch

from patrickstar.tensor2d import orders
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.sharded_products import column_product, row_product
from tests.tensor2d.on_meshes import draw, gap


class Post:
    def __init__(self):
        self.letters = collections.defaultdict(queue.Queue)
        self.sent = collections.defaultdict(list)  # by exchange: (of, to)


class ByThreads:
    def __init__(self, post, rank, size):
        self.post, self.rank, self.size, self.count = post, rank, size, 0

    def begin(self, sends, receives):
        for to, tensor in sends:
            self.post.letters[self.rank, to].put(tensor.clone())
            self.post.sent[self.count].append((self.rank, to))
        for of, tensor in receives:
            tensor.copy_(self.post.letters[of, self.rank].get(timeout=20))
        self.count += 1
        return self

    def wait(self):
        pass


def on_threads(size, function):
    post, found = Post(), [None] * size

    def run(rank):
        found[rank] = function(Line(ByThreads(post, rank, size)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, [sorted(post.sent[index]) for index in sorted(post.sent)]


@pytest.mark.parametrize(("size", "most_sent"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3)])
def test_an_owner_sends_few_copies(size, most_sent):
    for owner in (0, size - 1):

        def copied(line, owner=owner):
            tensor = torch.full((3,), float(line.rank))
            line.broadcast(tensor, owner).wait()
            return tensor[0].item(), line.received_bytes["panels"]

        found, sent = on_threads(size, copied)
        assert found == [(float(owner), 0 if rank == owner else 12) for rank in range(size)]
        copies = collections.Counter(of for exchange in sent for of, _ in exchange)
        assert max(copies.values()) == most_sent and sum(copies.values()) == size - 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_everybody_sends_to_another_one(size, dtype):
    hidden, first, second = draw(2, 2 * size, 6), draw(3 * size, 6), draw(3 * size, 6)
    grad = draw(2, 2 * size, 6, seed=1)
    whole = [part.to(dtype).double().requires_grad_() for part in (hidden, first, second)]
    out = whole[0] @ whole[1].t() @ whole[2]
    expected = [out, *torch.autograd.grad(out, whole, grad.to(dtype).double())]

    def share(line):
        parts = (hidden.chunk(size, 1), first.chunk(size), second.chunk(size))
        mine = [part[line.rank].to(dtype).requires_grad_() for part in parts]
        out = row_product(column_product(mine[0], mine[1], line), mine[2], line)
        return [out, *torch.autograd.grad(out, mine, grad.chunk(size, 1)[line.rank].to(dtype))]

    found, sent = on_threads(size, share)
    wholes = [torch.cat([rank[index] for rank in found], dim) for index, dim in enumerate((1, 1, 0, 0))]
    for value, other in zip(wholes, expected, strict=True):
        assert gap(value, other) <= (1e-12 if dtype == torch.float64 else 2e-2)
    assert len(sent) == 5 * (size - 1)  # once forward and twice backward of the first product, once each of the second
    for exchange in sent:
        assert {of for of, _ in exchange} == {to for _, to in exchange} == set(range(size))
        assert len(exchange) == size and all(of != to for of, to in exchange)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_products_in_pieces_are_those_of_one_process(size, batch, monkeypatch):
    monkeypatch.setattr(orders, "_FILLING", 1)
    monkeypatch.setattr(orders, "_TILE", 1)
    hidden, first, second = draw(batch, 4 * size, 6), draw(3 * size, 6), draw(3 * size, 6)
    biases, grad = (draw(3 * size, seed=2), draw(6, seed=3)), draw(batch, 4 * size, 6, seed=1)
    whole = [part.clone().requires_grad_() for part in (hidden, first, second, *biases)]
    out = (whole[0] @ whole[1].t() + whole[3]) @ whole[2] + whole[4]
    expected = [out, *torch.autograd.grad(out, whole, grad)]

    def share(line):
        parts = (hidden.chunk(size, 1), first.chunk(size), second.chunk(size), biases[0].chunk(size))
        mine = [*(part[line.rank].clone().requires_grad_() for part in parts), biases[1].clone().requires_grad_()]
        out = row_product(column_product(mine[0], mine[1], line, mine[3]), mine[2], line, mine[4])
        return [out, *torch.autograd.grad(out, mine, grad.chunk(size, 1)[line.rank])]

    found, sent = on_threads(size, share)
    wholes = [torch.cat([rank[index] for rank in found], dim) for index, dim in enumerate((1, 1, 0, 0, 0))]
    wholes.append(sum(rank[5] for rank in found))
    for value, other in zip(wholes, expected, strict=True):
        assert gap(value, other) <= 1e-12
    assert len(sent) == (3 + 2 * 3) * (size - 1)  # tokens are gathered three times, and two sums have three pieces

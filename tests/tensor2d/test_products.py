import collections
import itertools
import queue
import threading

import pytest
import torch

from patrickstar.ranks.distributed import open_ranks
from patrickstar.ranks.mesh import Mesh, MeshRanks
from patrickstar.tensor2d import (
    MeshGroup,
    MeshPlace,
    divide_activation,
    multiply,
    multiply_transposed,
    orders,
    transposed_multiply,
)
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.panels import check_divides
from patrickstar.tensor2d.sharded_products import column_product, row_product
from patrickstar.tensor2d.turning import turned, turned_elements
from tests.tensor2d.on_meshes import draw, gap, on_mesh, open_mesh, whole_activation

MESHES = [
    (1, 1),
    (1, 2),
    (2, 2),
    *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((2, 1), (1, 3), (2, 3), (3, 3))),
]
M, K, N = 12, 24, 36  # whole; any two of them differ by a factor that would show

PRODUCTS = {
    "A B": (multiply, lambda a, b: a @ b, (M, K), (K, N)),
    "A B^T": (multiply_transposed, lambda a, b: a @ b.t(), (M, K), (N, K)),
    "A^T B": (transposed_multiply, lambda a, b: a.t() @ b, (K, M), (K, N)),
}


def errors_of_products(group, device="cpu"):
    """{(product, dtype, kind): gap} of outputs, gradients, and gradients of gradients."""
    found = {}

    def whole_of(block):
        return whole_activation(block, group).cpu()

    for (name, (product, plain, *shapes)), dtype in itertools.product(
        PRODUCTS.items(), (torch.float64, torch.float32, torch.bfloat16)
    ):
        whole = [draw(*shape, seed=index, dtype=dtype) for index, shape in enumerate(shapes)]
        leaves = [divide_activation(part, group.place).to(device).requires_grad_() for part in whole]
        plain_leaves = [part.double().requires_grad_() for part in whole]
        out, expected = product(*leaves, group), plain(*plain_leaves)
        weight = draw(*expected.shape, seed=7, dtype=dtype)
        part = divide_activation(weight, group.place).to(device)
        found[name, dtype, "out"] = gap(whole_of(out), expected)
        if dtype == torch.bfloat16:
            out.backward(part)
            expected.backward(weight.double())
            grads, plain_grads = [leaf.grad for leaf in leaves], [leaf.grad for leaf in plain_leaves]
        else:
            # Twice, for the gradient of the squares of gradients.
            loss = (out.square() * part).sum()
            grads = torch.autograd.grad(loss, leaves, create_graph=True)
            grads = [*grads, *torch.autograd.grad(sum(part.square().sum() for part in grads), leaves)]
            loss = (expected.square() * weight.double()).sum()
            plain_grads = torch.autograd.grad(loss, plain_leaves, create_graph=True)
            plain_grads = [
                *plain_grads,
                *torch.autograd.grad(sum(part.square().sum() for part in plain_grads), plain_leaves),
            ]
        for index, (grad, plain_grad) in enumerate(zip(grads, plain_grads, strict=True)):
            found[name, dtype, f"gradient {index}"] = gap(whole_of(grad), plain_grad)
    return found


def received(group):
    found = {}
    for name, (product, _, *shapes) in PRODUCTS.items():
        before = group.received_bytes
        product(*(divide_activation(draw(*shape), group.place) for shape in shapes), group)
        since = group.received_bytes - before
        found[name] = since["panels"] + since["partial sums"]
    before = group.received_bytes
    block = divide_activation(draw(K, N), group.place).requires_grad_()
    out = turned(block, group)
    found["turned"] = (group.received_bytes - before)["turned blocks"]
    found["turned is right"] = gap(whole_activation(out, group), draw(K, N).t())
    out.backward(divide_activation(draw(N, K, seed=3), group.place))
    found["its gradient is right"] = gap(whole_activation(block.grad, group), draw(N, K, seed=3).t())
    found["turned, by formula"] = 8 * turned_elements((K, N), group.place)
    return found


def try_products(rows, columns):
    group = open_mesh(rows, columns)
    return errors_of_products(group), received(group), group.place


LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-8}


@pytest.mark.parametrize(("rows", "columns"), MESHES)
def test_products_as_one_process_computes_them(rows, columns):
    for rank, (errors, bytes_here, place) in enumerate(on_mesh(rows, columns, try_products)):
        assert place == MeshPlace(rows, columns, *divmod(rank, columns))
        wrong = {key: error for key, error in errors.items() if not error <= LIMITS[key[1]]}
        assert wrong == {}
        along_columns, along_rows = (columns - 1) / (rows * columns), (rows - 1) / (rows * columns)
        assert bytes_here["A B"] == 8 * (along_columns * M * K + along_rows * K * N)
        assert bytes_here["A B^T"] == 8 * (along_columns * M * N + along_rows * N * K)
        assert bytes_here["A^T B"] == 8 * (along_columns * K * M + along_rows * M * N)
        assert bytes_here["turned"] == bytes_here["turned, by formula"] <= 8 * K * N / place.size
        assert bytes_here["turned is right"] == bytes_here["its gradient is right"] == 0.0


def try_products_in_pieces(rows, columns):
    orders._FILLING, orders._TILE = 1, 1
    group = open_mesh(rows, columns)
    messages = collections.Counter()
    for axis in (group.along_rows, group.along_columns):

        def counted(step, outgoing, incoming, kind, swap=axis.swap_apart):
            messages[kind] += 1
            return swap(step, outgoing, incoming, kind)

        axis.swap_apart = counted
    found = {}
    for name, (product, _, *shapes) in PRODUCTS.items():
        messages.clear()
        product(*(divide_activation(draw(*shape), group.place) for shape in shapes), group)
        found[name] = dict(messages)
    return errors_of_products(group), received(group), found


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 2), (2, 1), *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((1, 3), (3, 1)))]
)
def test_products_in_pieces(rows, columns):
    steps = rows * columns - 1
    for errors, bytes_here, messages in on_mesh(rows, columns, try_products_in_pieces):
        assert {key: error for key, error in errors.items() if not error <= LIMITS[key[1]]} == {}
        along_columns, along_rows = (columns - 1) / (rows * columns), (rows - 1) / (rows * columns)
        assert bytes_here["A B"] == 8 * (along_columns * M * K + along_rows * K * N)
        assert bytes_here["A B^T"] == 8 * (along_columns * M * N + along_rows * N * K)
        assert bytes_here["A^T B"] == 8 * (along_columns * K * M + along_rows * M * N)
        sums = "A B^T" if rows == 1 else "A^T B"
        pieces = {"A B": {"panels": (2 if rows == 1 else 4) * steps}, sums: {"partial sums": 3 * steps}}
        assert messages == {name: pieces.get(name, {"panels": steps}) for name in PRODUCTS}


def test_pieces_fill_a_gpu():
    assert orders.cut(8192, 512, orders.SUMS) == [slice(0, 8192)]
    assert orders.cut(8192, 1024, orders.SUMS) == [slice(0, 4096), slice(4096, 8192)]
    assert orders.cut(16384, 8192, orders.GROWING) == [
        slice(0, 1024),
        slice(1024, 4096),
        slice(4096, 10240),
        slice(10240, 16384),
    ]
    assert [piece.stop for piece in orders.cut(4, 2**22, orders.SUMS, in_tiles=False)] == [1, 2, 4]
    assert orders.cut(1, 2**30, orders.SUMS, in_tiles=False) == [slice(0, 1)]
    assert orders.cut(8192, 8192, ()) == [slice(0, 8192)]


def sums_of_16_bits(rows, columns):
    """1 + 2^-8 + 2^-8, a summand of each panel or rank: 1 where bfloat16 is rounded in between."""
    group = open_mesh(rows, columns)
    summands = torch.tensor([[1.0, 2.0**-8, 2.0**-8]]).bfloat16()
    block, ones = divide_activation(summands, group.place), torch.ones(3, 3).bfloat16()
    return (
        multiply(block, divide_activation(ones, group.place), group)[0, 0].item(),
        multiply_transposed(block, divide_activation(ones, group.place), group)[0, 0].item(),
    )


def test_sums_of_16_bits_are_rounded_once():
    assert on_mesh(1, 3, sums_of_16_bits) == [(1 + 2.0**-7, 1 + 2.0**-7)] * 3


def sums_of_two(rows, columns):
    """1 + 2^-8 of the first rank and 2^-8 of the second, with a bias of 0, and with an added bias of -1."""
    group = open_mesh(rows, columns)
    if columns == 1:
        block = divide_activation(torch.tensor([[1.0], [2.0**-8], [2.0**-8], [0.0]]).bfloat16(), group.place)
        return transposed_multiply(block.repeat(1, 2), torch.ones(len(block), 1).bfloat16(), group)[0, 0].item()
    block = divide_activation(torch.tensor([[1.0, 2.0**-8, 2.0**-8, 0.0]]).bfloat16(), group.place)
    ones = divide_activation(torch.ones(4, 4).bfloat16(), group.place)
    bias = torch.full((2,), -1.0).bfloat16()
    return (
        multiply_transposed(block, ones, group)[0, 0].item(),
        multiply(block, ones, group)[0, 0].item(),
        multiply(block, ones, group, bias)[0, 0].item(),
    )


def test_sums_on_top_of_what_came_are_rounded_once():
    assert on_mesh(1, 2, sums_of_two)[0] == (1 + 2.0**-7, 1 + 2.0**-7, 2.0**-7)
    assert on_mesh(2, 1, sums_of_two)[0] == 1 + 2.0**-7


def over_own_groups(rows, columns):
    with open_ranks(timeout_seconds=60) as ranks:
        group = MeshGroup.of_ranks(MeshRanks(ranks, Mesh(rows=rows, columns=columns)))
        return errors_of_products(group), received(group)["turned is right"]


def test_products_over_the_lines_of_an_engine():
    for errors, turned_gap in on_mesh(2, 2, over_own_groups):
        assert {key: error for key, error in errors.items() if not error <= LIMITS[key[1]]} == {}
        assert turned_gap == 0.0


def test_bad_blocks_are_refused_before_anything_travels():
    group = MeshGroup.alone()
    with pytest.raises(ValueError, match="common dimension is 3 and 4"):
        multiply(torch.ones(2, 3), torch.ones(4, 5), group)
    with pytest.raises(ValueError, match="of one dtype"):
        multiply(torch.ones(2, 3), torch.ones(3, 5).double(), group)
    with pytest.raises(ValueError, match=r"a bias of shape \[3\] and torch.float32; give this rank's 5 elements"):
        multiply(torch.ones(2, 3), torch.ones(3, 5), group, torch.ones(3))
    with pytest.raises(ValueError, match=r"30 cannot be cut into lcm\(4, 3\) = 12 panels .* take 24, or a mesh of "):
        check_divides("features", 30, MeshPlace(4, 3))
    check_divides("features", 36, MeshPlace(4, 3))


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
def test_world_group_sends_to_another_one(size, dtype):
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

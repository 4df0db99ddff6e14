import gc

import pytest
import torch
from torch import nn

from patrickstar.tensor2d import (
    MLP2D,
    Attention2D,
    CrossEntropy2D,
    Embedding2D,
    LayerNorm2D,
    Linear2D,
    LMHead2D,
    MeshGroup,
    MeshPlace,
    Placement,
    RMSNorm2D,
    Sent,
    SmallEmbedding2D,
    Split,
    assemble_activation,
    cost,
    divide_activation,
    divide_batch,
    initialise_normal,
    losses,
    match_replicas,
    norms,
    whole_values,
)
from patrickstar.tensor2d.lines import Line
from tests.tensor2d.on_meshes import draw, gap, on_mesh, open_mesh, whole_activation

PLACES = MeshPlace(2, 3).world_group()


PLACED = [
    (Placement(Split.BLOCKS), (12, 18), (6, 6)),
    (Placement(Split.BLOCKS, transposed=True), (12, 18), (9, 4)),
    (Placement(Split.BLOCKS, parts=(6, 3, 3), transposed=True), (12, 18), (9, 4)),
    (Placement(Split.BLOCKS, parts=(6, 6)), (12, 18), (6, 6)),
    (Placement(Split.BLOCKS, padded_to=18), (13, 6), (9, 2)),
    (Placement(Split.BLOCKS, padded_to=18, transposed=True), (13, 6), (3, 6)),
    (Placement(Split.COLUMNS, padded_to=18), (13,), (6,)),
    (Placement(Split.COLUMNS, parts=(6, 3, 3)), (12,), (4,)),
    (Placement(Split.COLUMNS), (5, 6), (5, 2)),
    (Placement(Split.ROWS, parts=(6, 4, 2)), (12, 5), (6, 5)),
    (Placement(Split.ROWS, transposed=True), (5, 6), (3, 5)),
]


def test_what_is_sharded_is_assembled_again():
    for placement, shape, block in PLACED:
        whole = draw(*shape)
        blocks = [placement.divide(whole, place) for place in PLACES]
        assert {tuple(part.shape) for part in blocks} == {block}, placement
        assert torch.equal(placement.assemble(blocks, PLACES[0], shape[0]), whole), placement
        if placement.parts:  # the first column has the first third of each part, the first row the first half
            number = 2 if placement.split is Split.ROWS else 3
            rows = torch.cat([part[: len(part) // number] for part in whole.split(placement.parts)])
            first = blocks[0].t() if placement.transposed else blocks[0]
            assert torch.equal(first.flatten()[0], rows.flatten()[0]), placement


def test_activations_are_sharded_and_assembled():
    whole = draw(4, 5, 6)
    blocks = [divide_activation(whole, place) for place in PLACES]
    assert blocks[4].shape == (2, 5, 2) and torch.equal(blocks[4], whole[2:, :, 2:4])
    assert torch.equal(assemble_activation(blocks, PLACES[0]), whole)
    with pytest.raises(ValueError, match=r"dimension 0 of \[3, 5, 6\]: 3 cannot be cut into 2 rows .* take 4"):
        divide_batch(draw(3, 5, 6), PLACES[0])


def linears_each_way(group):
    found = {}
    plain = nn.Linear(12, 24).double()
    torch.manual_seed(1)
    for parameter in plain.parameters():
        parameter.data.copy_(draw(*parameter.shape, seed=4))
    whole, weight = draw(6, 3, 12).requires_grad_(), draw(6, 3, 24, seed=2)
    expected = plain(whole)
    expected.backward(weight)
    for sent in Sent:
        layer = Linear2D(12, 24, group, sent=sent, dtype=torch.float64)
        layer.load_whole(dict(plain.named_parameters()))
        block = divide_activation(whole.detach(), group.place).requires_grad_()
        before = group.received_bytes
        out = layer(block)
        out.backward(divide_activation(weight, group.place))
        since = group.received_bytes - before
        counted = cost.linear(18, 12, 24, group.place.rows, group.place.columns, sent).total
        found[sent, "bytes"] = since["panels"] + since["partial sums"] - 8 * counted
        found[sent, "out"] = gap(whole_activation(out, group), expected)
        found[sent, "input"] = gap(whole_activation(block.grad, group), whole.grad)
        for name, grad in whole_values(layer, lambda parameter: parameter.grad).items():
            found[sent, name] = gap(grad, plain.get_parameter(name).grad)
    return found


def norms_far_from_zero(group):
    """In float32 where the mean is 1000 times the deviation, relative to PyTorch's in float64."""
    whole = (draw(6, 3, 24) + 1000).float()
    layer = LayerNorm2D(24, group)
    out = whole_activation(layer(divide_activation(whole, group.place)), group)
    return gap(out, nn.functional.layer_norm(whole.double(), (24,)))


def norms_in_16_bits(group):
    whole = draw(6, 3, 24, dtype=torch.bfloat16)
    out = RMSNorm2D(24, group, dtype=torch.bfloat16)(divide_activation(whole, group.place))
    expected = nn.functional.rms_norm(whole.double(), (24,), eps=1e-6)
    error = gap(whole_activation(out, group), expected)
    layer = LayerNorm2D(24, group, dtype=torch.bfloat16)
    values = {"weight": draw(24, seed=1).bfloat16(), "bias": draw(24, seed=2).bfloat16()}
    layer.load_whole(values)
    block = divide_activation(whole, group.place).requires_grad_()
    again = layer(block)
    again.backward(torch.ones_like(block))
    plain = whole.double().requires_grad_()
    expected = nn.functional.layer_norm(plain, (24,), *(value.double() for value in values.values()))
    expected.backward(torch.ones_like(plain))
    grad = whole_activation(block.grad, group)
    return out.dtype, max(error, gap(whole_activation(again, group), expected), gap(grad, plain.grad))


def losses_in_16_bits(group):
    logits, labels = draw(6, 3, 12, dtype=torch.bfloat16), torch.arange(18).view(6, 3) % 11
    block = divide_activation(logits, group.place).requires_grad_()
    loss = CrossEntropy2D(11, group)(block, divide_batch(labels, group.place), num_targets=24)
    loss.backward()
    plain = logits.double()[..., :11].requires_grad_()
    expected = nn.functional.cross_entropy(plain.flatten(0, 1), labels.flatten(), reduction="sum") / 24
    expected.backward()
    grad = whole_activation(block.grad, group)
    return loss.dtype, gap(loss, expected), gap(grad[..., :11], plain.grad), grad[..., 11:].abs().max().item()


def rows_without_gradient(group):
    table = Embedding2D(11, 6, group, padding_idx=7, dtype=torch.float64)
    tokens = torch.tensor([[7, 1], [7, 10], [1, 1], [0, 3], [2, 2], [4, 7]])
    table(divide_batch(tokens, group.place)).sum().backward()
    return whole_values(table, lambda parameter: parameter.grad)["weight"][:, 0].tolist()


def initial_values(group):
    torch.manual_seed(group.world_group.rank)
    model = nn.ModuleList([SmallEmbedding2D(5, 6, group), Embedding2D(5, 6, group), Linear2D(6, 12, group)])
    model.append(LMHead2D(6, 5, group, bias=True))
    initialise_normal(model, 0.02)
    match_replicas(model)
    parts = group.along_rows.gather(model[0].weight.detach())
    weight = model[2].weight.detach()
    blocks = group.world_group.gather(weight)
    tables = [torch.cat(group.along_rows.gather(model[1].weight.detach()))[5:]]
    tables.append(torch.cat(group.along_columns.gather(model[3].weight.detach()), dim=1)[:, 5:])
    return (
        all(torch.equal(part, parts[0]) for part in parts) and not any(table.any() for table in tables),
        weight.std().item(),
        [block[0, 0].item() for block in blocks],
    )


def saved_bytes(group):
    model = nn.Sequential(LayerNorm2D(24, group), Attention2D(24, 6, group), MLP2D(24, 96, group))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor
        return tensor

    gc.collect()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(divide_activation(draw(6, 32, 24, dtype=torch.float32), group.place))
    del out
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def all_layers(rows, columns):
    group = open_mesh(rows, columns)
    checks = [linears_each_way, norms_far_from_zero, norms_in_16_bits, losses_in_16_bits, rows_without_gradient]
    return [check(group) for check in (*checks, initial_values, saved_bytes)]


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 1), (2, 2), *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((1, 3), (2, 3), (3, 3)))],
)
def test_layers(rows, columns):
    alone = saved_bytes(MeshGroup.alone())
    for linears, far, rms, loss, embedding, initial, saved in on_mesh(rows, columns, all_layers):
        assert {key: value for key, value in linears.items() if not abs(value) <= 1e-12} == {}
        assert far <= 2e-4  # the inputs' rounding is 6e-5 of their deviation
        assert rms[0] == torch.bfloat16 and rms[1] <= 2**-8
        assert loss[0] == torch.float32 and loss[1] <= 1e-6 and loss[2] <= 2**-8 and loss[3] == 0
        assert embedding == [1.0, 3.0, 2.0, 1.0, 1.0, 0, 0, 0, 0, 0, 1.0]
        assert initial[0] and 0.005 < initial[1] < 0.05 and len(set(initial[2])) == rows * columns
        assert saved <= 1.02 * alone / (rows * columns), f"{saved} of {alone}"


def at(rows, columns):
    group = MeshGroup.alone()
    group.place = MeshPlace(rows, columns)
    return group


def norm_gaps(dtype, device):
    hidden, grad = (draw(3, 5, 64, seed=seed).to(dtype).to(device) for seed in (0, 1))
    hidden[1] += 4
    weight, bias = (draw(64, seed=seed).to(dtype).to(device) for seed in (2, 3))
    found = {}
    for name, parameters in {"layer": [weight, bias], "layer without bias": [weight], "rms": []}.items():
        leaves = [part.detach().requires_grad_() for part in (hidden, *parameters)]
        plain = [part.detach().double().requires_grad_() for part in leaves]
        if name == "rms":
            out = norms._RMSNorm.apply(leaves[0], Line(), 64, 1e-6)
            expected = nn.functional.rms_norm(plain[0], (64,), eps=1e-6)
        else:
            out = norms._LayerNorm.apply(*leaves, *[None] * (3 - len(leaves)), Line(), 1e-5)
            expected = nn.functional.layer_norm(plain[0], (64,), *plain[1:])
        values = [out, *torch.autograd.grad(out, leaves, grad)]
        others = [expected, *torch.autograd.grad(expected, plain, grad.double())]
        assert {value.dtype for value in values} == {dtype}
        for index, (value, other) in enumerate(zip(values, others, strict=True)):
            found[name, index] = gap(value, other)
    return found


NORM_LIMITS = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", NORM_LIMITS)
def test_norms_that_columns_divide(dtype):
    assert {key: value for key, value in norm_gaps(dtype, "cpu").items() if not value <= NORM_LIMITS[dtype]} == {}


REFUSED = [
    (lambda: Linear2D(10, 12, at(2, 3)), r"Linear2D\(10, 12\): the input: 10 cannot be cut into lcm\(2, 3\) = 6"),
    (lambda: Linear2D(12, 10, at(2, 3)), r"the output: 10 .* take 12"),
    (lambda: Attention2D(12, 4, at(1, 3)), r"heads: 4 cannot be cut into .* take 3, or a mesh of 3 x 1"),
    (lambda: Attention2D(12, 4, at(1, 2), key_heads=1), r"heads of keys and values: 1 .* take 2, or a mesh of 2 x 1"),
    (lambda: Attention2D(12, 4, at(1, 1), key_heads=3), r"4 heads and 3 of keys"),
    (lambda: LayerNorm2D(10, at(2, 3)), r"LayerNorm2D\(10\): features: 10 cannot be cut into 3 columns"),
    (lambda: LMHead2D(12, 9, at(1, 1), tied=Embedding2D(8, 12, at(1, 1))), "table is 8 x 12; give one of 9 x 12"),
    (lambda: Embedding2D(8, 4, at(1, 1))(torch.tensor([8])), "tokens are 8 to 8, the table has 8 rows"),
    (lambda: CrossEntropy2D(8, at(1, 1))(torch.ones(2, 8), torch.tensor([0, 9])), "a label is 9; give 0 to 7"),
    (lambda: CrossEntropy2D(8, at(1, 1))(torch.ones(2, 8), torch.zeros(3).long()), r"labels \[3\]"),
    (lambda: Linear2D(4, 4, at(1, 1)).load_whole({"weight": torch.ones(4, 8)}), r"the layer has \[4, 4\]"),
    (lambda: Linear2D(4, 4, at(1, 1)).load_whole({"scale": torch.ones(4)}), "has no parameter 'scale'"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_copies_some_tokens_at_a_time(dtype, monkeypatch):
    monkeypatch.setattr(losses, "_TILE_LOGITS", 40)
    logits = draw(7, 11, dtype=dtype).requires_grad_()
    labels = torch.tensor([3, -100, 0, 10, 5, 5, 2])
    copied, plain_tiles = [], losses._tiles
    monkeypatch.setattr(losses, "_tiles", lambda found: copied.append([*plain_tiles(found)]) or copied[-1])
    loss = CrossEntropy2D(11, MeshGroup.alone())(logits, labels)
    (found,) = torch.autograd.grad(loss, [logits])
    expected = nn.functional.cross_entropy(logits.float(), labels)
    assert gap(loss, expected) <= 1e-6
    assert gap(found, *torch.autograd.grad(expected, [logits])) <= (1e-6 if dtype == torch.float32 else 4e-3)
    assert copied == [[slice(0, 3), slice(3, 6), slice(6, 9)]] * 2


def test_what_does_not_fit_is_refused():
    for make, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            make()

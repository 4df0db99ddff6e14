import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from patrickstar.ranks.mesh import Axis, Mesh
from patrickstar.tensor2d import (
    MeshGroup,
    Sent,
    clip_grad_norm,
    cost,
    divide_batch,
    load_whole,
    whole_logits,
    whole_values,
)
from patrickstar.tensor2d.cost import LayerShape, Mode, choose, crossing_tokens, received_1d, received_2d
from patrickstar.tensor2d.division import Split
from patrickstar.tensor2d.layer import Layer2D
from patrickstar.tensor2d.model_cost import layer_shape
from tests.tensor2d.models import (
    BATCH,
    LENGTH,
    MODELS,
    VOCABULARY,
    batch,
    by_our_names,
    make_loss,
    plain_loss,
    reference,
)
from tests.tensor2d.on_meshes import gap, on_mesh, open_mesh

STEPS, MAX_NORM = 10, 0.5
TOKENS = BATCH * LENGTH
LINEARS = {name: layer_shape(reference(name, torch.float32)).linears() for name in MODELS}


def build(name, dtype, group, device="cpu"):
    theirs = reference(name, dtype)
    make, config = MODELS[name]
    ours = make(config, group).to(device, dtype)
    load_whole(ours, by_our_names(name, theirs))
    return ours, theirs


def compare_once(name, group, device="cpu"):
    ours, theirs = build(name, torch.float64, group, device)
    theirs = theirs.to(device)  # also there the angles of positions are float32, and those of two devices differ
    ids, labels = (part.to(device) for part in batch())
    expected_logits, expected = plain_loss(theirs, ids, labels)
    expected.backward()
    mine, targets = (divide_batch(part, group.place) for part in (ids, labels))
    before = group.received_bytes
    logits = ours(mine)
    loss = make_loss(group)(logits, targets)
    forward = group.received_bytes - before
    loss.backward()
    backward = group.received_bytes - before - forward
    rows = whole_logits(logits, VOCABULARY, group)
    gaps = {"logits": gap(rows, divide_batch(expected_logits, group.place)), "loss": gap(loss, expected)}
    grads = whole_values(ours, lambda parameter: parameter.grad)
    expected_grads = by_our_names(name, theirs, lambda parameter: parameter.grad)
    expected_grads.setdefault("head.weight", expected_grads["tokens.weight"])
    assert grads.keys() == expected_grads.keys()
    gaps |= {key: gap(grads[key], expected_grads[key]) for key in grads}
    replicated = sum(
        module._parameters[key].numel()
        for module in ours.modules()
        if isinstance(module, Layer2D)
        for key, placement in module.placements.items()
        if placement.split is Split.COLUMNS and module._parameters.get(key) is not None
    )
    shapes = [tuple(parameter.shape) for parameter in ours.parameters()]
    return gaps, forward, backward, replicated, shapes


def train(name, group):
    ours, theirs = build(name, torch.float64, group)
    ids, labels = batch()
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW(model.parameters(), **settings) for model in (ours, theirs)]
    gaps = {}
    for step in range(STEPS):
        loss = make_loss(group)(ours(divide_batch(ids, group.place)), divide_batch(labels, group.place))
        expected = plain_loss(theirs, ids, labels)[1]
        gaps[f"loss {step}"] = gap(loss, expected)
        for optimizer, value in zip(optimizers, (loss, expected), strict=True):
            optimizer.zero_grad()
            value.backward()
        norms = clip_grad_norm(ours, MAX_NORM, group), torch.nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM)
        assert norms[1] > MAX_NORM
        gaps[f"norm {step}"] = gap(*norms)
        for optimizer in optimizers:
            optimizer.step()
    found, expected = whole_values(ours), by_our_names(name, theirs)
    return gaps | {key: gap(found[key], expected[key]) for key in expected}


def check_models(rows, columns):
    group = open_mesh(rows, columns)
    return {name: (*compare_once(name, group), train(name, group)) for name in MODELS}, group.place


def product_bytes(linears, config, tied, place):
    vocabulary = -(-VOCABULARY // place.num_panels) * place.num_panels
    found = cost.embedding(TOKENS, 24, place.rows, place.columns)
    found += cost.head(TOKENS, 24, vocabulary, place, tied=tied)
    for _ in range(config.num_hidden_layers):
        for features in linears:
            found += cost.linear(TOKENS, *features, place.rows, place.columns)
    return 8 * found.forward, 8 * found.backward


def grad_or_zeros(parameter):
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def train_beside(_rows, columns):
    dist.init_process_group("gloo")
    mesh = Mesh(data=2, columns=columns)
    group = MeshGroup.of_torch(mesh)
    index = mesh.coordinates(dist.get_rank())[Axis.DATA]
    ours, theirs = build("gpt2", torch.float64, group)
    ids, labels = (part.roll(index, dims=1) for part in batch())
    ours.blocks[0].mlp.up.weight.requires_grad_(False)
    theirs.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    for block in ours.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    expected = plain_loss(theirs, ids, labels)[1]
    loss = make_loss(group)(ours(ids), labels)
    for value in (loss, expected):
        value.backward()
    norms = clip_grad_norm(ours, 0.1, group), torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    found, wanted = whole_values(ours, grad_or_zeros), by_our_names("gpt2", theirs, grad_or_zeros)
    return (
        index,
        loss.item(),
        {"loss": gap(loss, expected), "norm": gap(*norms)} | {key: gap(found[key], wanted[key]) for key in wanted},
    )


def test_checkpointed_and_clipped_beside_a_data_axis():
    found = on_mesh(2, 2, train_beside)
    for _, _, gaps in found:
        assert {key: value for key, value in gaps.items() if not value <= 1e-10} == {}
    assert [index for index, *_ in found] == [0, 0, 1, 1]
    assert found[0][1] == found[1][1] != found[2][1] == found[3][1]


def test_layers_are_counted_as_they_are():
    assert LINEARS["gpt2"] == [(24, 72), (24, 24), (24, 96), (96, 24)]
    assert LINEARS["llama"] == [(24, 96), (48, 24), (24, 72), (36, 24)]  # heads are wider than the hidden size


def of_products(received):
    return received["panels"] + received["partial sums"] + received["turned blocks"]


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (1, 1),
        (1, 2),
        (2, 2),
        *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((2, 1), (1, 3), (2, 3), (3, 3))),
    ],
)
def test_models_as_hugging_face_computes_them(rows, columns):
    shapes_of_all = []
    for by_model, place in on_mesh(rows, columns, check_models):
        for name, (gaps, forward, backward, replicated, _, trained) in by_model.items():
            assert {key: value for key, value in gaps.items() if not value <= 1e-10} == {}, name
            assert gaps["logits"] <= 1e-12 and gaps["loss"] <= 1e-12
            assert {key: value for key, value in trained.items() if not value <= 1e-9} == {}, name
            config = MODELS[name][1]
            expected = product_bytes(LINEARS[name], config, name == "gpt2", place)
            assert (of_products(forward), of_products(backward)) == expected
            norms, tokens = 2 * config.num_hidden_layers + 1, TOKENS // rows
            sums = (2, 2) if name == "gpt2" else (1, 1)  # of each norm
            small = (columns - 1) * tokens * (norms * sums[0] + 3) + (rows - 1) * (tokens + 2)
            assert forward["small values"] == 8 * small
            assert backward["small values"] == 8 * ((columns - 1) * tokens * norms * sums[1] + (rows - 1) * replicated)
        shapes_of_all.append([shapes for *_, shapes, _ in by_model.values()])
    assert all(shapes == shapes_of_all[0] for shapes in shapes_of_all)


H = 1024
GPT = LayerShape(hidden=H)


def test_elements_of_square_meshes():
    for q in (1, 2, 4, 8):
        tokens, p = 48 * H, q * q
        published = received_2d(GPT, tokens, q, q, Sent.INPUT)
        assert published.forward == (q - 1) / q**2 * (7 * tokens * H + 12 * H**2)
        assert published.backward == 2 * published.forward
        assert received_2d(GPT, tokens, q, q).forward == (q - 1) / q**2 * (4 * tokens * H + 12 * H**2)
        one = received_1d(GPT, tokens, p)
        assert one.forward == 4 * (p - 1) / p * tokens * H and one.total == 2.5 * one.forward


def test_where_one_dimension_and_two_cross():
    assert crossing_tokens(GPT, 2, 2, Sent.INPUT) == pytest.approx(2.4 * H)
    assert crossing_tokens(GPT, 4, 4, Sent.INPUT) == pytest.approx(12 / 13 * H)  # 0.92 h
    assert crossing_tokens(GPT, 2, 2) == pytest.approx(1.5 * H)
    assert crossing_tokens(GPT, 4, 4) == pytest.approx(0.75 * H)
    assert crossing_tokens(GPT, 2, 2, passes="total") == pytest.approx(9 / 4.5 * H)
    assert crossing_tokens(GPT, 2, 1) == pytest.approx(3 * H)
    assert crossing_tokens(GPT, 1, 2, Sent.INPUT) == math.inf  # 3.5 bsh and 2 bsh
    assert crossing_tokens(GPT, 1, 2) == math.inf  # the same 2 bsh
    for rows, columns in ((2, 2), (2, 4), (4, 2), (4, 4)):
        tokens = crossing_tokens(GPT, rows, columns, passes="total")
        for factor in (0.99, 1.01):
            one = received_1d(GPT, factor * tokens, rows * columns).total
            assert (received_2d(GPT, factor * tokens, rows, columns).total < one) == (factor > 1)


def test_llama_layers_are_counted():
    llama = LayerShape(hidden=4096, intermediate=14336, keys=1024, is_gated=True)
    assert sum(m * n for m, n in llama.linears()) == 4096 * (4096 + 2048 + 4096 + 3 * 14336)
    assert received_2d(llama, 100, 1, 2).forward == 4 * 100 * 4096 / 2


def test_choices_say_why():
    few = choose(GPT, batch=4, length=128, heads=16, ranks=4)
    assert (few.mode, few.rows, few.columns) == (Mode.ONE, 1, 4)
    assert few.received_bytes == 2 * received_1d(GPT, 512, 4).total
    many = choose(GPT, batch=16, length=1024, heads=16, ranks=4)
    assert (many.mode, many.rows, many.columns) == (Mode.TWO, 4, 1)
    assert "16384 tokens are 16 times the hidden size" in many.reason and "one dimension 240 MiB" in many.reason
    assert choose(GPT, batch=2, length=8192, heads=16, ranks=4).rows == 2  # as many rows as samples
    assert "4 x 1 (samples: 2)" in choose(GPT, batch=2, length=8192, heads=16, ranks=4).reason
    only = {mode: choose(GPT, batch=16, length=1024, heads=16, ranks=4, mode=mode) for mode in Mode}
    assert {mode: (found.mode, found.rows, found.columns) for mode, found in only.items()} == {
        Mode.ONE: (Mode.ONE, 1, 4),
        Mode.TWO: (Mode.TWO, 4, 1),
    }
    assert "one dimension" not in only[Mode.TWO].reason and " x " not in only[Mode.ONE].reason
    heads = choose(GPT, batch=4, length=1024, heads=6, ranks=4)
    assert (heads.rows, heads.columns) == (2, 2) and "1 x 4 (heads: 6, of keys 6)" in heads.reason
    with pytest.raises(ValueError, match="cannot be divided among 4 ranks: .*heads: 3.*samples: 5"):
        choose(GPT, batch=5, length=1024, heads=3, ranks=4)

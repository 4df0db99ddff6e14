import itertools
import os

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from patrickstar.tensor2d import CrossEntropy2D, cost, load_whole, whole_logits, whole_values
from patrickstar.tensor2d.layer import source_values
from patrickstar.tensor2d.lines import Line, TorchLine
from patrickstar.tensor2d.one_dimension import ColumnLinear1D, RowLinear1D, tall_group, wide_group
from patrickstar.tensor2d.sharded_models import parallelize_1d
from tests.distributed import run_ranks
from tests.tensor2d.models import BATCH, GPT2, MODELS, ONE, VOCABULARY, batch, by_our_names, plain_loss, reference
from tests.tensor2d.on_meshes import draw, gap

LENGTH = 6


def open_line():
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return Line()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return TorchLine(dist.new_group())


def compare(name, line):
    theirs = reference(name, torch.float64)
    make, config = MODELS[name]
    tall, wide = tall_group(line), wide_group(line)
    ours = make(config, tall, ONE).to(torch.float64)
    load_whole(ours, by_our_names(name, theirs))
    ids, labels = batch(LENGTH)
    expected_logits, expected = plain_loss(theirs, ids, labels)
    expected.backward()
    first = LENGTH // line.size * line.rank
    counts = [line.received_bytes.copy()]
    logits = ours(ids.chunk(line.size, dim=1)[line.rank], first, LENGTH)
    loss = CrossEntropy2D(VOCABULARY, wide)(logits, labels)
    counts.append(line.received_bytes.copy())
    loss.backward()
    counts.append(line.received_bytes.copy())
    gaps = {"loss": gap(loss, expected), "logits": gap(whole_logits(logits, VOCABULARY, wide), expected_logits)}
    grads = whole_values(ours, lambda parameter: parameter.grad)
    wanted = by_our_names(name, theirs, lambda parameter: parameter.grad)
    wanted.setdefault("head.weight", wanted["tokens.weight"])
    assert grads.keys() == wanted.keys()
    gaps |= {key: gap(grads[key], wanted[key]) for key in wanted}
    received = [after - before for before, after in zip(counts, counts[1:], strict=False)]
    return gaps, [part["panels"] + part["partial sums"] for part in received]


def compare_in_place(name, line, attention):
    theirs, ours = (reference(name, torch.float64, attention) for _ in range(2))
    parallelize_1d(ours, line)
    tokens = batch(LENGTH)[0]
    loss = ours(tokens, labels=tokens).loss
    # Hugging Face's loss is rounded to float32.
    expected = nn.functional.cross_entropy(theirs(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    for value in (expected, loss):
        value.backward()
    found = source_values(ours, lambda parameter: parameter.grad)
    assert torch.equal(*(generated(model) for model in (ours, theirs)))
    parameters = dict(theirs.named_parameters(remove_duplicate=False))
    assert {id(parameters[key]) for key in found} == {id(parameter) for parameter in theirs.parameters()}
    return {"loss": gap(loss, expected)} | {key: gap(grad, parameters[key].grad) for key, grad in found.items()}


def generated(model):
    tokens, mask = batch(LENGTH)[0], torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, :3] = 0
    return model.generate(tokens, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)


def in_16_bits(line):
    group = tall_group(line)
    layers = ColumnLinear1D(12, 24, group, bias=False), RowLinear1D(24, 12, group, bias=False)
    weights = draw(24, 12, seed=1) / 4, draw(12, 24, seed=2) / 4
    for layer, weight in zip(layers, weights, strict=True):
        layer.bfloat16().load_whole({"weight": weight.bfloat16()})
    whole = draw(2, 6, 12, dtype=torch.bfloat16)
    shard = whole.chunk(line.size, dim=1)[line.rank].clone().requires_grad_()
    out = layers[1](layers[0](shard))
    out.backward(torch.ones_like(out))
    plain = whole.double().requires_grad_()
    leaves = [weight.bfloat16().double().requires_grad_() for weight in weights]
    expected = plain @ leaves[0].t() @ leaves[1].t()
    expected.backward(torch.ones_like(expected))
    found = torch.cat(line.gather(out.detach()), dim=1), torch.cat(line.gather(shard.grad), dim=1)
    grads = [whole_values(layer, lambda parameter: parameter.grad)["weight"] for layer in layers]
    return [
        gap(one, other)
        for one, other in zip((*found, *grads), (expected, plain.grad, *(leaf.grad for leaf in leaves)), strict=True)
    ]


def check():
    line = open_line()
    pairs = itertools.product(MODELS, ("sdpa", "eager"))
    in_place = {(name, attention): compare_in_place(name, line, attention) for name, attention in pairs}
    return {name: compare(name, line) for name in MODELS}, in_place, in_16_bits(line)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3))])
def test_models_in_one_dimension_as_hugging_face_computes_them(ranks):
    for by_model, in_place, rounded in [check()] if ranks == 1 else run_ranks(ranks, check):
        assert max(rounded) <= 2**-7
        assert {key: value for gaps in in_place.values() for key, value in gaps.items() if not value <= 1e-10} == {}
        for name, (gaps, received) in by_model.items():
            assert {key: value for key, value in gaps.items() if not value <= 1e-10} == {}, name
            assert gaps["loss"] <= 1e-12 and gaps["logits"] <= 1e-12
            tokens = BATCH * LENGTH
            layer = cost.received_1d(cost.LayerShape(hidden=24), tokens, ranks)
            part = (ranks - 1) / ranks * tokens * 24
            # Embedding and head: a reduce-scatter and an all-gather each, their opposites, and one more for the head.
            assert received == [8 * (2 * layer.forward + 2 * part), 8 * (2 * layer.backward + 3 * part)]


def test_meshes_with_columns_are_refused():
    with pytest.raises(ValueError, match="mesh is 1 x 2: make it by tall_group"):
        group = wide_group(Line())
        group.place = group.place.__class__(1, 2)
        ColumnLinear1D(4, 4, group)


def test_what_has_no_form_in_one_dimension_is_refused():
    with pytest.raises(ValueError, match=r"Linear cannot be sharded over a mesh: it has no configuration"):
        parallelize_1d(nn.Linear(2, 2), Line())
    bert = transformers.AutoModel.from_config(transformers.BertConfig(hidden_size=24, num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"BertModel .*: pooler.dense is outside of the layers .*mode to \"2d\""):
        parallelize_1d(bert, Line())
    model = transformers.AutoModelForCausalLM.from_config(GPT2)
    line = Line()
    parallelize_1d(model, line)
    tokens = batch(LENGTH)[0]
    with pytest.raises(ValueError, match="cut out their tokens of whole sequences; call it with input_ids"):
        model(labels=tokens)
    line.size = 4
    with pytest.raises(ValueError, match="sequences of 6 tokens cannot be divided among 4 ranks; give 8"):
        model(tokens)

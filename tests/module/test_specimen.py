import functools
import types

import torch
from torch import nn

from patrickstar.module.specimen import copy_specimen, take_specimen
from tests.bits import assert_same_bits


class Layer(nn.Module):
    def __init__(self, index, width=4, window=None):
        super().__init__()
        self.layer_idx = index
        self.window = window or 0
        self.linear = nn.Linear(4, width)
        self.drop = nn.Dropout(0.5)
        self.attention_dropout = 0.1

    def forward(self, x):
        return x + self.drop(self.linear(x))[..., :4]


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.config = type("Config", (), {})()
        self.config.num_hidden_layers, self.config.hidden_dropout = len(layers), 0.2
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(layers)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(1, dtype=torch.bfloat16))

    def forward(self, tokens):
        self.count += 1
        hidden = self.embed(tokens)
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden = layer(hidden)
        return self.head(hidden)


def test_memory_is_shared_and_nothing_is_changed():
    model = Model([Layer(i) for i in range(6)]).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    specimen = take_specimen(model)
    assert [layer.layer_idx for layer in specimen.layers] == [0, 1] and len(specimen.experts) == 9
    assert specimen.head.weight is specimen.embed.weight
    assert specimen.embed.weight.data_ptr() == model.embed.weight.data_ptr()
    other = copy_specimen(specimen)
    assert other.head.weight is other.embed.weight is not specimen.embed.weight
    assert other.layers[1].linear.weight.data_ptr() == model.layers[1].linear.weight.data_ptr()
    tokens = torch.arange(8)[None]
    assert torch.equal(specimen(tokens), other(tokens))  # no dropout, though they train
    specimen(tokens).sum().backward()
    assert len(model.layers) == 6 and not model.training and model.config.hidden_dropout == 0.2
    assert all(param.grad is None for param in model.parameters())
    assert model.layers[0].attention_dropout == 0.1 and model.layers[0].drop.p == 0.5
    assert_same_bits(model.state_dict(), before)


def test_layers_until_there_is_one_of_each_kind():
    kinds = {
        "one": ([Layer(i) for i in range(5)], 2),
        "another class inside": ([*(Layer(i) for i in range(3)), nn.Linear(4, 4), Layer(4)], 4),
        "another shape": ([Layer(0), Layer(1), Layer(2, width=6), Layer(3), Layer(4, width=6)], 3),
        "another number": ([Layer(i, window=5 if i % 3 == 2 else None) for i in range(9)], 3),
    }
    for name, (layers, expected) in kinds.items():
        assert len(take_specimen(Model(layers)).layers) == expected, name
    assert len(take_specimen(Model([Layer(i) for i in range(5)]), all_layers=True).layers) == 5


def test_matrices_of_zeros_get_values():
    model = Model([Layer(i) for i in range(2)])
    nn.init.zeros_(model.layers[1].linear.weight)
    nn.init.zeros_(model.layers[1].linear.bias)
    specimen = take_specimen(model)
    assert specimen.layers[1].linear.weight.std() > 0 and not specimen.layers[1].linear.bias.any()
    assert not model.layers[1].linear.weight.any()


def test_half_precision_and_the_meta_device_get_values_of_their_own():
    half = Model([Layer(i) for i in range(4)]).bfloat16()
    specimen = take_specimen(half)
    assert {value.dtype for value in specimen.state_dict().values()} == {torch.float32}
    assert torch.equal(specimen.embed.weight.bfloat16(), half.embed.weight)
    with torch.device("meta"):
        meta = Model([Layer(i) for i in range(4)])
    meta._buffers["count"] = torch.zeros(1)
    specimen = take_specimen(meta)
    assert all(param.isfinite().all() and param.std() > 0 for param in specimen.parameters())
    assert specimen.head.weight is specimen.embed.weight
    assert all(param.is_meta for param in meta.parameters())


def test_a_forward_that_was_assigned_computes_with_the_copy():
    """Also a forward that calls the class's through a closure, as TRL's does."""
    model = Model([Layer(0), Layer(1)])
    former = model.forward

    def forward(self, tokens, scale):
        return scale * former(tokens)

    model.forward = functools.partial(types.MethodType(forward, model), scale=2)
    tokens = torch.arange(8).view(2, 4)
    specimen = take_specimen(model)
    for copied in (specimen, copy_specimen(specimen)):
        called = []
        copied.layers[0].register_forward_hook(lambda *_, called=called: called.append("the copy"))
        copied(tokens)
        assert called == ["the copy"] and model.count == 0

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits, first_difference
from tests.training import make_config

aten = torch.ops.aten


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 4)
        self.b = nn.Linear(6, 4)
        self.table = nn.Embedding(5, 6)

    def forward(self, index):
        return (self.a(self.table(index)) + self.b(self.table(index))).square().mean()


VALUES = torch.linspace(-3.0, 4.7, 24).reshape(4, 6)
ROW = torch.linspace(-1.0, 2.3, 4)


def weights(model):
    return [model.a.weight, model.b.weight]


def rounded(m):
    return VALUES.bfloat16().to(m.a.weight.dtype)


def sort_into(m):
    torch.sort(rounded(m), out=(m.a.weight, torch.empty(4, 6, dtype=torch.long)))


def largest_into(m):
    torch.max(rounded(m), dim=1, out=(m.a.bias, torch.empty(4, dtype=torch.long)))


def set_data(m):
    m.a.weight.data = rounded(m) * 2


def add_in_place(m):
    weight = m.a.weight
    weight += VALUES


ARRIVE = {
    "foreach mul": lambda m: torch._foreach_mul_(weights(m), 0.3),
    "foreach mul by tensor": lambda m: torch._foreach_mul_(weights(m), torch.tensor(0.3)),
    "foreach of views": lambda m: torch._foreach_mul_([w[1:] for w in weights(m)], 0.3),
    "foreach of all": lambda m: torch._foreach_add_(list(m.parameters()), 0.1),
    "foreach copy": lambda m: torch._foreach_copy_(weights(m), [VALUES, VALUES * 3]),
    "foreach lerp": lambda m: torch._foreach_lerp_(weights(m), [VALUES, VALUES], 0.3),
    "foreach addcmul": lambda m: torch._foreach_addcmul_(weights(m), [VALUES, VALUES], [VALUES, VALUES], 0.3),
    "foreach of one by another": lambda m: torch._foreach_add_([m.a.weight], [m.b.weight], alpha=0.3),
    "foreach by keyword": lambda m: torch._foreach_mul_(self=weights(m), scalar=0.3),
    "foreach zero": lambda m: torch._foreach_zero_(weights(m)),
    "tuple out, sort": sort_into,
    "tuple out, max": largest_into,
    "out": lambda m: torch.mul(VALUES, 0.3, out=m.a.weight),
    "out with itself": lambda m: torch.add(m.a.weight, m.b.weight, alpha=0.3, out=m.a.weight),
    "out of a view": lambda m: torch.mul(VALUES[1], 0.3, out=m.a.weight[1]),
    "OpOverload": lambda m: aten.mul_.Tensor(m.a.weight, torch.tensor(0.3)),
    "OpOverload by keyword": lambda m: aten.copy_.default(self=m.a.weight, src=VALUES),
    "OpOverload of a list": lambda m: aten._foreach_mul_.Scalar(weights(m), 0.3),
    "OpOverload with out": lambda m: aten.mul.out(VALUES, torch.tensor(0.3), out=m.a.weight),
    "OpOverloadPacket": lambda m: aten.mul_(m.a.weight, torch.tensor(0.3)),
    "operator": add_in_place,
    "item": lambda m: m.a.weight.__setitem__((0, slice(1, 3)), 0.3),
    "data": lambda m: m.a.weight.data.mul_(0.3),
    "set data": set_data,
    "set_": lambda m: m.a.weight.set_(VALUES),
    "detach": lambda m: m.a.weight.detach().mul_(0.3),
    "transposed": lambda m: m.a.weight.T.mul_(0.3),
    "view of a view": lambda m: m.a.weight.view(-1)[2:9].reshape(7, 1).add_(0.3),
    "chunk": lambda m: m.a.weight.chunk(2)[1].mul_(0.3),
    "unbind": lambda m: m.a.weight.unbind(1)[0].mul_(0.3),
    "index_add_ of values of its dtype": lambda m: m.a.weight.index_add_(0, torch.tensor([2, 1]), rounded(m)[:2]),
    "foreach beside another": lambda m: torch._foreach_mul_([rounded(m), m.a.weight], 0.3),
    "index_add_": lambda m: m.a.weight.index_add_(0, torch.tensor([1, 1]), VALUES[:2]),
    "masked_fill_": lambda m: m.a.weight.masked_fill_(VALUES > 0, 0.3),
    "initialisation": lambda m: nn.init.constant_(m.a.weight, 0.3),
    "initialisation by keyword": lambda m: nn.init.constant_(tensor=m.a.weight, val=0.3),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(
        torch.cat([VALUES.view(-1), ROW]), m.a.parameters()
    ),
    "load_state_dict": lambda m: m.a.load_state_dict({"weight": VALUES, "bias": ROW}),
}
ROUND = {"out", "out with itself", "out of a view", "OpOverload with out"}
REFUSED = {
    "relu, inplace": lambda m: F.relu(m.a.weight, inplace=True),
    "hardtanh, inplace": lambda m: F.hardtanh(m.a.weight, -0.1, 0.1, inplace=True),
    "elu, inplace": lambda m: F.elu(m.a.weight, inplace=True),
    "leaky_relu of a view, inplace": lambda m: F.leaky_relu(m.a.weight[1], inplace=True),
    "threshold by keyword": lambda m: F.threshold(input=m.a.weight, threshold=0.1, value=7.0, inplace=True),
    "embedding with max_norm": lambda m: F.embedding(torch.tensor([0, 1]), m.table.weight, max_norm=0.1),
    "resize_": lambda m: m.a.weight.resize_(2, 2),
    "swap_tensors": lambda m: torch.utils.swap_tensors(m.a.weight, nn.Parameter(torch.zeros(4, 6))),
    "set_ of a view": lambda m: m.a.weight[1].set_(torch.zeros(6)),
    "set_ of a storage": lambda m: m.a.weight.set_(torch.zeros(24).untyped_storage(), 0, (4, 6)),
    "data of another shape": lambda m: setattr(m.a.weight, "data", torch.zeros(2, 2)),
    "data of another parameter": lambda m: setattr(m.a.weight, "data", m.b.weight.data),
}


def build():
    torch.manual_seed(0)
    return Model()


@torch.no_grad()
def written(engine, write):
    engine.load_state_dict(build().state_dict())
    error = ""
    try:
        write(engine.module)
    except RuntimeError as raised:
        error = str(raised)
    engine(torch.tensor([0, 1]))
    weight = engine.module.a.weight
    return error, engine.state_dict(), weight.detach().clone().as_subclass(torch.Tensor)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_writes(precision):
    engine, _ = initialize_engine(build, 0, make_config(precision, default_chunk_size=1024))
    with engine:
        for name, write in ARRIVE.items():
            plain = build()
            with torch.no_grad():
                write(plain)
            expected = plain.state_dict()
            assert first_difference(expected, build().state_dict()) is not None, name
            error, values, computed_with = written(engine, write)
            assert error == "", name
            if name in ROUND and precision == "bf16":
                for key, value in expected.items():
                    torch.testing.assert_close(values[key], value, rtol=2**-8, atol=2**-8)
            else:
                assert_same_bits(values, expected, name)
            assert_same_bits(computed_with, values["a.weight"].to(computed_with.dtype), name)
        for name, write in REFUSED.items():
            error, values, computed_with = written(engine, write)
            print(name, error)
            assert error != "", name
            assert_same_bits(values, build().state_dict(), name)
            assert_same_bits(computed_with, values["a.weight"].to(computed_with.dtype), name)


def test_an_embedding_that_writes_its_weight():
    def build_with_norm():
        model = build()
        model.table.max_norm = 0.5
        return model

    plain = build_with_norm()
    plain(torch.tensor([0, 1]))
    engine, _ = initialize_engine(build_with_norm, 0, make_config("bf16"))
    with engine:
        engine(torch.tensor([0, 1]))
        assert_same_bits(engine.state_dict()["table.weight"], plain.table.weight.detach())

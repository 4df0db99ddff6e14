import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.training import ADAM, make_config


class Model(nn.Module):
    def __init__(self, change):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        change(self)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def tie_by_data(m):
    m.head.weight.data = m.embed.weight.data


def tie_frozen(m):
    tie_by_data(m)
    m.head.requires_grad_(False)


def tie_rows(m):
    m.head.weight = nn.Parameter(m.embed.weight[:12].detach())


def tie_transposed(m):
    m.square, m.embed.weight = nn.Parameter(torch.rand(8, 8)), nn.Parameter(torch.rand(8, 8))
    m.square.data = m.embed.weight.data.t()


def keep_buffer(m):
    m.register_buffer("table", m.embed.weight.data)


def keep_attribute(m):
    m.table = m.embed.weight.detach()


def keep_in_a_list(m):
    m.head.rows = {"of": [m.embed.weight.data[3:5]]}


def keep_with_pytorch(m):
    m.embed.max_norm = 1.0
    m.table = m.embed.weight.data


REFUSED = {
    tie_by_data: "embed.weight and head.weight are two parameters over one memory",
    tie_rows: "embed.weight and head.weight are two parameters over one memory",
    tie_transposed: "square and embed.weight are two parameters over one memory",
    keep_buffer: "the buffer table has memory of embed.weight",
    keep_attribute: "the attribute table has memory of embed.weight",
    keep_in_a_list: "the attribute head.rows has memory of embed.weight",
    keep_with_pytorch: "the attribute table has memory of embed.weight",
}


@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_refused(change, device):
    with torch.device(device):
        module = Model(change)
    with pytest.raises(ValueError) as refused:
        initialize_engine(module, 0, make_config())
    assert REFUSED[change] in str(refused.value)
    assert type(module.embed.weight) is nn.Parameter


def tie_trained_head(m):
    tie_by_data(m)
    m.embed.requires_grad_(False)


def tie_both_frozen(m):
    tie_frozen(m)
    m.embed.requires_grad_(False)
    m.last = nn.Parameter(torch.ones(20))
    m.register_forward_hook(lambda module, args, out: out * module.last)


def tie(m):
    m.head.weight = m.embed.weight


def freeze(m):
    keep_buffer(m)
    m.embed.requires_grad_(False)


def normalise(m):
    torch.nn.utils.spectral_norm(m.head)


def prune_head(m):
    prune.l1_unstructured(m.head, "weight", 0.5)


def cut_columns(m):
    both = torch.rand(20, 16)
    m.embed.weight, m.head.weight = nn.Parameter(both[:, :8]), nn.Parameter(both[:, 8:])


def cut_rows(m):
    both = torch.rand(40, 8)
    m.embed.weight, m.head.weight = nn.Parameter(both[:20]), nn.Parameter(both[20:])


def hold_parameter(m):
    m.head.known = [m.embed.weight]


TIES = [tie, tie_frozen, tie_trained_head, tie_both_frozen]
ALLOWED = [freeze, normalise, prune_head, cut_columns, cut_rows, hold_parameter]


@pytest.mark.parametrize("change", [*TIES, *ALLOWED])
def test_trained_as_in_plain_pytorch(change):
    tokens = torch.arange(20)
    plain = Model(change)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    engine, optimizer = initialize_engine(lambda: Model(change), 0, make_config())
    with engine:
        for _ in range(3):
            plain_optimizer.zero_grad()
            expected = nn.functional.cross_entropy(plain(tokens), tokens.roll(1))
            expected.backward()
            plain_optimizer.step()
            loss = nn.functional.cross_entropy(engine(tokens), tokens.roll(1))
            engine.backward(loss)
            optimizer.step()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tie_is_kept(precision, tmp_path):
    tokens = torch.arange(20)
    engine, optimizer = initialize_engine(lambda: Model(tie_frozen), 0, make_config(precision))
    with engine:
        embed, head = engine.module.embed.weight, engine.module.head.weight
        for step in range(3):
            engine.backward(nn.functional.cross_entropy(engine(tokens).float(), tokens.roll(1)))
            assert head.grad is None and embed.grad is not None
            engine.module.head.zero_grad()
            optimizer.step()
            with torch.no_grad():
                (head if step == 0 else embed).mul_(0.5)
                assert_same_bits(head.clone(), embed.clone())
            if step == 0:
                engine.save_checkpoint(tmp_path)
                saved = engine.state_dict(), optimizer.state_dict()
        assert_same_bits(saved[0]["head.weight"], saved[0]["embed.weight"])
        assert set(optimizer.state_dict()["state"]) == {0}
        engine.load_checkpoint(tmp_path)
        assert_same_bits((engine.state_dict(), optimizer.state_dict()), saved)
        optimizer.load_state_dict(saved[1])
        assert_same_bits(optimizer.state_dict(), saved[1])
        head.requires_grad_(True)
        with pytest.raises(ValueError, match="has the memory of embed.weight requires grad by now"):
            engine(tokens)
        head.requires_grad_(False)
        engine(tokens)
    assert type(embed) is type(head) is nn.Parameter and head.data_ptr() == embed.data_ptr()


def test_a_frozen_one_cannot_be_unfrozen():
    tokens = torch.arange(20)
    engine, _ = initialize_engine(lambda: Model(freeze), 0, make_config())
    with engine:
        engine(tokens)
        engine.module.embed.requires_grad_(True)
        with pytest.raises(ValueError, match="the buffer table has memory of embed.weight"):
            engine(tokens)


def test_buffers_that_modules_have_in_common_stay_one():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            for layer in self.layers:
                layer.register_buffer("count", self.layers[0]._buffers.get("count", torch.zeros(())))

        def forward(self, x):
            for layer in self.layers:
                layer.count += 1
                x = layer(x)
            return x

    engine, _ = initialize_engine(Counts, 0, make_config())
    with engine:
        engine(torch.ones(1, 4))
        assert engine.module.layers[0].count.item() == engine.module.layers[1].count.item() == 2

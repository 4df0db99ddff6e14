"""Buffers that operations resize, and sparse or lazily conjugated ones."""

import logging

import pytest
import torch
from torch import nn

from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.runtime import initialize_engine
from tests.distributed import run_ranks
from tests.ranks.runs import rank_and_size
from tests.training import ADAM, make_config


class Quantized(nn.Module):
    """Quantisation-aware: the first forward resizes the empty buffers of a per-channel observer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.fake = torch.ao.quantization.default_fused_per_channel_wt_fake_quant()

    def forward(self, x):
        return nn.functional.linear(x, self.fake(self.layer.weight), self.layer.bias)


class Graph(nn.Module):
    """Changes a sparse adjacency matrix in each forward."""

    def __init__(self, scale: float = 1.0, persistent: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("coo", (scale * torch.eye(8)).to_sparse(), persistent)
        self.register_buffer("csr", (scale * torch.eye(8)).to_sparse_csr(), persistent=False)
        self.register_buffer("conjugated", torch.randn(8, dtype=torch.complex64).conj())

    def forward(self, x):
        with torch.no_grad():
            self.coo.mul_(0.5)
        return torch.sparse.mm(self.coo, self.layer(x)) + torch.sparse.mm(self.csr, x) * self.conjugated.imag


def losses_of(model, optimizer, backward, num_steps=3):
    for _ in range(num_steps):
        loss = model(torch.ones(8, 8)).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def train(make_model):
    engine, optimizer = initialize_engine(make_model, 0, make_config("fp32"))
    with engine:
        return list(losses_of(engine, optimizer, engine.backward))


def train_plain(make_model):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    return list(losses_of(model, optimizer, torch.Tensor.backward))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sparse")
@pytest.mark.parametrize("make_model", [Quantized, Graph])
def test_training(make_model):
    assert train(make_model) == pytest.approx(train_plain(make_model), rel=1e-5)


def train_graph_of_rank():
    rank, _ = rank_and_size()
    return train(lambda: Graph(scale=1.0 + rank))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_ranks_have_the_first_ones_sparse_buffers():
    assert run_ranks(2, train_graph_of_rank) == [pytest.approx(train_plain(Graph), rel=1e-5)] * 2


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_buffer_that_cannot_be_saved(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "patrickstar"):
        engine, _ = initialize_engine(lambda: Graph(persistent=True), 0, make_config("fp32"))
    assert "the buffer coo is sparse and cannot be saved" in caplog.text
    with engine:
        with pytest.raises(CheckpointError, match="the buffer coo is sparse.*persistent=False"):
            engine.save_checkpoint(tmp_path)
        torch.testing.assert_close(engine.state_dict()["coo"], torch.eye(8).to_sparse())

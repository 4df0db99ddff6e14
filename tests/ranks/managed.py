from typing import Any

import torch
from torch import nn

from patrickstar import torch_scope
from patrickstar.runtime import initialize_engine
from tests.ranks.runs import rank_and_size, train_plainly_for_all
from tests.training import make_config


class Managed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.chunked = nn.Linear(32, 32)
        self.modes = nn.Parameter(torch.randn(17, dtype=torch.complex64))
        with torch_scope(do_allreduce=True):
            self.averaged = nn.Linear(32, 32)
        with torch_scope(do_allreduce=False):
            self.own = nn.Linear(32, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.averaged(torch.relu(self.chunked(self.embedding(tokens))))
        hidden = torch.fft.irfft(torch.fft.rfft(hidden) * self.modes)
        # Detached, since the layer differs on each rank and gradients of the rest must not.
        return hidden.square().mean() + self.own(hidden.detach()).square().mean()


def train_managed() -> dict[str, Any]:
    rank, size = rank_and_size()
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(Managed, 0, make_config("fp32", use_cpu_embedding=True))
    with engine:
        engine.train()
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            optimizer.zero_grad()
            tokens = torch.randint(0, 16, (size, 8), generator=generator)[rank]
            engine.backward(engine(tokens))
            optimizer.step()
        return {"state": {name: value.clone() for name, value in engine.state_dict().items()}}


def train_managed_plain(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def losses(module, _step):
        return map(module, torch.randint(0, 16, (size, 8), generator=generator))

    return train_plainly_for_all(Managed, 4, losses)["state"]

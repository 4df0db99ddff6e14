"""A model with all that checkpoints treat in a special way, and its training with plain PyTorch."""

import copy

import torch
from torch import nn

from patrickstar.runtime import initialize_engine

ADAM = {"lr": 3e-3, "betas": (0.8, 0.97), "eps": 1e-7}
DECAYS = (0.1, 0.0)


class Net(nn.Module):
    """Two groups, a frozen layer, a shared parameter, a buffer, and sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.middle = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 1.5))

    def forward(self, tokens):
        hidden = self.norm(self.middle(torch.tanh(self.frozen(self.embed(tokens)))))
        logits = self.head(hidden) * self.scale[0]
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def groups_of(model):
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [param for _, param in trained if param.dim() == 2], "weight_decay": DECAYS[0]},
        {"params": [param for _, param in trained if param.dim() != 2], "weight_decay": DECAYS[1]},
    ]


def plain_run(seed=0, steps=3):
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model), **ADAM)
    train_plain(model, optimizer, steps, 1)
    with torch.no_grad():
        model.scale.mul_(2)
    return model, optimizer


def batches(steps, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 11, (4, 6), generator=generator) for _ in range(steps)]


def train_plain(model, optimizer, steps, seed):
    losses = []
    for tokens in batches(steps, seed):
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def continued(model, optimizer, steps=4):
    """Losses and values of the plain run after more steps; the run stays as it is."""
    model, state = copy.deepcopy(model), optimizer.state_dict()
    again = torch.optim.AdamW(groups_of(model), **ADAM)
    again.load_state_dict(copy.deepcopy(state))
    losses = train_plain(model, again, steps, 2)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def engine_of(params=None):
    torch.manual_seed(9)
    params = params or {"lr": 1.0, "weight_decay": 0.5}
    options = {"optimizer": {"type": "AdamW", "params": params}, "default_chunk_size": 1024}
    return initialize_engine(Net, 0, options, model_parameters=groups_of)

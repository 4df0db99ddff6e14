"""Recipes that train with several engines at once, and the same with plain PyTorch."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from patrickstar.runtime import initialize_engine
from tests.models import VOCAB, gpt2
from tests.training import ADAM, make_config


@dataclasses.dataclass
class Result:
    losses: list[float]
    states: dict[str, dict[str, torch.Tensor]]
    reports: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Player:
    """A model of a recipe; plain PyTorch's and an engine's have one interface."""

    call: Callable[..., Any]
    backward: Callable[[torch.Tensor], None]
    step: Callable[[], None]
    zero_grad: Callable[[], None]


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))


class Discriminator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def frozen(build):
    return lambda: build().requires_grad_(False)


def wide():
    return gpt2(hidden=64, layers=3)


def narrow():
    return gpt2(hidden=32, layers=2)


def tokens_of(generator):
    return torch.randint(1, VOCAB, (2, 16), generator=generator)


def distil(players, generator):
    """A student learns a frozen teacher's distribution."""
    teacher, student = players["teacher"], players["student"]
    tokens = tokens_of(generator)
    with torch.no_grad():
        wanted = teacher.call(input_ids=tokens)["logits"].float().softmax(-1)
    student.zero_grad()
    logits = student.call(input_ids=tokens)["logits"].float()
    loss = functional.kl_div(logits.log_softmax(-1).flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean")
    student.backward(loss)
    student.step()
    return [loss]


def prefer(players, generator):
    """DPO: a policy and its initial values."""
    policy, reference = players["policy"], players["reference"]
    chosen, rejected = tokens_of(generator), tokens_of(generator)

    def score(player):
        logits = player.call(input_ids=torch.cat([chosen, rejected]))["logits"].float().log_softmax(-1)
        told = torch.cat([chosen, rejected])[:, 1:, None]
        return logits[:, :-1].gather(2, told).sum((1, 2)).view(2, -1)

    with torch.no_grad():
        before = score(reference)
    policy.zero_grad()
    now = score(policy) - before
    loss = -functional.logsigmoid(0.1 * (now[0] - now[1])).mean()
    policy.backward(loss)
    policy.step()
    return [loss]


def adversaries(players, generator):
    """A generator learns through its discriminator, whose gradients are dropped."""
    maker, judge = players["maker"], players["judge"]
    real, noise = torch.randn(8, 16, generator=generator), torch.randn(8, 8, generator=generator)
    fake = maker.call(noise)
    judge.zero_grad()
    judge_loss = functional.softplus(-judge.call(real).float()).mean()
    judge_loss = judge_loss + functional.softplus(judge.call(fake.detach()).float()).mean()
    judge.backward(judge_loss)
    judge.step()
    maker.zero_grad()
    maker_loss = functional.softplus(-judge.call(fake).float()).mean()
    maker.backward(maker_loss)
    maker.step()
    return [judge_loss, maker_loss]


def actor_and_critic(players, generator):
    """One loss trains a policy and its critic; gradients pass through a frozen reward model."""
    actor, critic, reward = players["actor"], players["critic"], players["reward"]
    state = torch.randn(8, 8, generator=generator)
    actor.zero_grad()
    critic.zero_grad()
    action = actor.call(state)
    paid = reward.call(action).float()
    expected = critic.call(action.detach()).float()
    loss = functional.mse_loss(expected, paid.detach()) - paid.mean()
    actor.backward(loss)
    actor.step()
    critic.step()
    return [loss]


RECIPES = {
    "distil": (distil, {"teacher": frozen(wide), "student": narrow}),
    "prefer": (prefer, {"policy": narrow, "reference": frozen(narrow)}),
    "adversaries": (adversaries, {"maker": Generator, "judge": Discriminator}),
    "actor_and_critic": (
        actor_and_critic,
        {"actor": Generator, "critic": Discriminator, "reward": frozen(Discriminator)},
    ),
}


def run(name: str, config: dict[str, Any], steps: int = 6, rank: int = 0) -> Result:
    """One engine for each model, all within the device budget of ``config``."""
    step, builders = RECIPES[name]
    with contextlib.ExitStack() as opened:
        players, engines = {}, {}
        for index, (role, build) in enumerate(builders.items()):
            torch.manual_seed(index)
            engine, optimizer = initialize_engine(build, 0, copy.deepcopy(config))
            engines[role] = opened.enter_context(engine)
            players[role] = Player(engine, engine.backward, optimizer.step, optimizer.zero_grad)
        generator = torch.Generator().manual_seed(7 + rank)
        losses = [loss.item() for _ in range(steps) for loss in step(players, generator)]
        states = {role: engine.state_dict() for role, engine in engines.items()}
        return Result(losses, states, {role: engine.report() for role, engine in engines.items()})


def run_plain(name: str, steps: int = 6, rank: int = 0) -> Result:
    step, builders = RECIPES[name]
    models, players = {}, {}
    for index, (role, build) in enumerate(builders.items()):
        torch.manual_seed(index)
        models[role] = build()
        players[role] = plain_player(models[role])
    generator = torch.Generator().manual_seed(7 + rank)
    losses = [loss.item() for _ in range(steps) for loss in step(players, generator)]
    return Result(losses, {role: model.state_dict() for role, model in models.items()})


def plain_player(model: nn.Module) -> Player:
    trained = [param for param in model.parameters() if param.requires_grad]
    if not trained:
        return Player(model, torch.Tensor.backward, lambda: None, lambda: None)
    optimizer = torch.optim.AdamW(trained, **ADAM)

    def step():
        for param in trained:
            if dist.is_initialized():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        optimizer.step()

    return Player(model, torch.Tensor.backward, step, optimizer.zero_grad)


def config_of(precision: str, **more: Any) -> dict[str, Any]:
    return make_config(precision, default_chunk_size=4096, gradient_clipping=0.0, **more)

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.models import VOCAB, Case, lm_loss, token_batch
from tests.training import ADAM, Run, make_config

BACKEND = "aot_eager"
"""Dynamo and AOTAutograd without compiling C++ or Triton."""
WIDTH = 32
Forward = Callable[..., Any]


class Block(nn.Module):
    """Also returns a view of one of its parameters, which is used behind the last block."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(2, WIDTH))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)))), self.scale[1:]


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, _weight=torch.randn(VOCAB, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids)
        scales = []
        for block in self.blocks:
            hidden, scale = block(hidden)
            scales.append(scale)
        hidden = hidden * torch.stack(scales).prod(0) + self.shift
        return {"loss": lm_loss(self.head(hidden), labels)}


TOWER = Case(Tower, token_batch)


def whole(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend=BACKEND)


def in_place(module: nn.Module) -> nn.Module:
    module.compile(backend=BACKEND)
    return module


def one_graph(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend=BACKEND, fullgraph=True)


def wrapped_blocks(module: nn.Module) -> nn.Module:
    for index, block in enumerate(module.blocks):
        module.blocks[index] = torch.compile(block, backend=BACKEND)
    return module


def blocks_in_place(module: nn.Module) -> nn.Module:
    for block in module.blocks:
        block.compile(backend=BACKEND)
    return module


BEFORE = {form.__name__: form for form in (whole, in_place, one_graph, wrapped_blocks, blocks_in_place)}


def engine_compile(engine: Any) -> Forward:
    engine.compile(backend=BACKEND)
    return engine


def engine_compile_as_deepspeed(engine: Any) -> Forward:
    engine.compile(BACKEND, compile_kwargs={"dynamic": False})
    return engine


def module_compile(engine: Any) -> Forward:
    engine.module.compile(backend=BACKEND)
    return engine


def compiled_engine(engine: Any) -> Forward:
    return torch.compile(engine, backend=BACKEND)


def compiled_module(engine: Any) -> Forward:
    return torch.compile(engine.module, backend=BACKEND)


def compiled_function(engine: Any) -> Forward:
    @torch.compile(backend=BACKEND)
    def forward(**batch: Any) -> Any:
        return {key: value * 1.0 for key, value in engine(**batch).items()}

    return forward


def layers_compile(engine: Any) -> Forward:
    for block in engine.module.blocks:
        block.compile(backend=BACKEND)
    return engine


AFTER = {
    form.__name__: form
    for form in (
        engine_compile,
        engine_compile_as_deepspeed,
        module_compile,
        layers_compile,
        compiled_engine,
        compiled_module,
        compiled_function,
    )
}
"""Forms that are compiled after the engine is made; each returns the callable to use."""


def case_of(form: str, case: Case = TOWER) -> Case:
    return Case(lambda: BEFORE[form](case.build()), case.batch, case.loss)


def train_after(form: str, precision: str = "fp32", steps: int = 4, **config: Any) -> Run:
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(TOWER.build, 0, make_config(precision, gradient_clipping=1.0, **config))
    with engine:
        forward = AFTER[form](engine)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = forward(**TOWER.batch(generator))["loss"]
            engine.backward(loss)
            losses.append(loss.item())
            optimizer.step()
            del loss
        assert engine.is_compiled
        return Run(losses, engine.state_dict(), engine.report())


def train_compiled_plain(form: str, case: Case = TOWER, steps: int = 4) -> Run:
    torch.manual_seed(0)
    module = BEFORE[form](case.build())
    optim = torch.optim.AdamW(module.parameters(), **ADAM)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        optim.zero_grad()
        loss = case.loss(module(**case.batch(generator)))
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optim.step()
        losses.append(loss.item())
    return Run(losses, {name: value.detach().clone() for name, value in module.state_dict().items()}, {})


def without_wrappers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}

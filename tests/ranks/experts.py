import dataclasses
from typing import Any

import torch
from torch import nn

from patrickstar.module.param_ranks import keep_on_rank
from patrickstar.runtime import initialize_engine
from patrickstar.session.core_setup import current_program
from tests.ranks.runs import rank_and_size
from tests.training import ADAM, make_config

STEPS = 6
CLIPPING = 0.01
"""Less than the norm of every step."""


class Experts(nn.Module):
    """Each shared layer is followed by an expert of the rank; the last expert is frozen."""

    def __init__(self, rank: int):
        super().__init__()
        self.shared = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        generator = torch.Generator().manual_seed(rank)
        with torch.no_grad():
            for param in self.experts.parameters():
                param.normal_(std=0.1, generator=generator)
        self.experts[2].requires_grad_(False)
        keep_on_rank(self.experts.parameters())

    def forward(self, x: torch.Tensor, num_shared: int, num_experts: int) -> torch.Tensor:
        for index, (layer, expert) in enumerate(zip(self.shared, self.experts, strict=True)):
            if index < num_shared:
                x = torch.relu(layer(x))
            if index < num_experts:
                x = x + expert(x)
        return x.float().square().mean()


@dataclasses.dataclass
class Run:
    precision: str = "fp32"
    accumulate: int = 1
    on_host: bool = False
    speculation: str = "auto"
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: {"gradient_clipping": CLIPPING})


def inputs(size: int, accumulate: int = 1) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [list(torch.randn(size, 8, 64, generator=generator)) for _ in range(STEPS * accumulate)]


def layers_used(step: int, rank: int) -> tuple[int, int]:
    """A rank leaves out experts; in the end one rank has its own gradients alone and the other none."""
    return {(3, 1): (3, 0), (4, 0): (3, 2), (5, 0): (0, 3), (5, 1): (0, 0)}.get((step, rank), (3, 3))


def train_experts(run: Run) -> dict[str, Any]:
    rank, size = rank_and_size()
    torch.manual_seed(0)
    config = make_config(run.precision, **{"default_chunk_size": 4096, **run.options})
    config["optimizer"] |= {"speculation": run.speculation}
    config["optimizer"]["params"]["use_hybrid_adam"] = not run.on_host
    engine, optimizer = initialize_engine(lambda: Experts(rank), 0, config)
    losses, norms = [], []
    with engine:
        batches = iter(inputs(size, run.accumulate))
        for step in range(STEPS):
            optimizer.zero_grad()
            for _ in range(run.accumulate):
                loss = engine(next(batches)[rank].requires_grad_(), *layers_used(step, rank))
                engine.backward(loss / run.accumulate)
                losses.append(loss.item())
            optimizer.step()
            norms.append(engine.report()["grad_norm"])
            if step == 1:
                evaluate(engine)
        layout, report, refused = engine._session.layout, engine.report(), refused_calls(engine, optimizer)
        program = current_program(engine._session.runtime, layout) or []
        chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
        shared = {index for index, chunk in enumerate(chunks) if chunk["num_ranks"] > 1}
    values = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    return {
        "losses": losses,
        "norms": norms,
        "values": values,
        "report": report,
        "refused": refused,
        "shared_chunks": shared,
        "shared_numel": sum(chunks[index]["numel"] for index in shared),
        "exchanged": {one.chunk for one in program if one.op in ("gather", "scatter")},
    }


def evaluate(engine: Any) -> None:
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(8, 64), 3, 3)
    engine.train()


def refused_calls(engine: Any, optimizer: Any) -> list[str]:
    said = []
    for call in (
        engine.state_dict,
        lambda: engine.load_state_dict({}),
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: engine.save_checkpoint("unused"),
        lambda: engine.load_checkpoint("unused"),
        lambda: engine.export_weights("unused"),
        lambda: engine.resize(1),
    ):
        try:
            call()
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def train_experts_plain(size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    modules = [Experts(rank) for rank in range(size)]
    for module in modules:
        module.shared = modules[0].shared
    shared = list(modules[0].shared.parameters())
    own = (param for module in modules for param in module.experts.parameters())
    params = [*shared, *(param for param in own if param.requires_grad)]
    optimizer = torch.optim.AdamW(params, **ADAM)
    norms = []
    for step, batch in enumerate(inputs(size)):
        optimizer.zero_grad()
        for rank, module in enumerate(modules):
            module(batch[rank].requires_grad_(), *layers_used(step, rank)).backward()
        for param in shared:
            param.grad = None if param.grad is None else param.grad / size
        norms.append(float(nn.utils.clip_grad_norm_(params, CLIPPING)))
        optimizer.step()
    values = [{name: value.detach() for name, value in module.state_dict().items()} for module in modules]
    return {"norms": norms, "values": values}

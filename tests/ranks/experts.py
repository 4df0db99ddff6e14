import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from patrickstar import _C
from patrickstar.module.param_ranks import RankPart, keep_part
from patrickstar.runtime import initialize_engine
from patrickstar.session.core_setup import current_program
from tests.ranks.runs import rank_and_size
from tests.training import ADAM, make_config

STEPS = 6
CLIPPING = 0.01
"""Less than the norm of every step."""


class Experts(nn.Module):
    """Each shared layer is followed by a part of an expert, which has 64 rows for each of ``size`` ranks; the last
    expert is frozen.
    """

    def __init__(self, size: int):
        super().__init__()
        self.shared = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(64, 64 * size) for _ in range(3))
        with torch.no_grad():
            for param in self.experts.parameters():
                param.normal_(std=0.1)
        self.experts[2].requires_grad_(False)

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


def divided(rank: int, size: int) -> Experts:
    """A module whose engine has the rank's parts of experts."""
    module = Experts(size)
    for param in module.experts.parameters():
        keep_part(param, RankPart(rank, size, _gather))
    return module


def _gather(part: torch.Tensor) -> torch.Tensor:
    with _C.HostAllocations():
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)


def train_experts(run: Run) -> dict[str, Any]:
    rank, size = rank_and_size()
    torch.manual_seed(0)
    config = make_config(run.precision, **{"default_chunk_size": 4096, **run.options})
    config["optimizer"] |= {"speculation": run.speculation}
    config["optimizer"]["params"]["use_hybrid_adam"] = not run.on_host
    engine, optimizer = initialize_engine(lambda: divided(rank, size), 0, config)
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
        layout, report = engine._session.layout, engine.report()
        program = current_program(engine._session.runtime, layout) or []
        chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
        shared = {index for index, chunk in enumerate(chunks) if chunk["num_ranks"] > 1}
        state, states = engine.state_dict(), optimizer.state_dict()["state"]
    values = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    return {
        "losses": losses,
        "norms": norms,
        "values": values,
        "report": report,
        "state": state,
        "states": states,
        "shared_chunks": shared,
        "shared_numel": sum(chunks[index]["numel"] for index in shared),
        "exchanged": {one.chunk for one in program if one.op in ("gather", "scatter")},
    }


def evaluate(engine: Any) -> None:
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(8, 64), 3, 3)
    engine.train()


def train_experts_plain(size: int) -> dict[str, Any]:
    """A part without gradient is not updated, so each rank's is a parameter of its own."""
    torch.manual_seed(0)
    module = Experts(size)
    shared = list(module.shared.parameters())
    whole = dict(module.experts.named_parameters(prefix="experts"))
    parts = [
        {
            name: nn.Parameter(param.detach().chunk(size)[rank].clone(), param.requires_grad)
            for name, param in whole.items()
        }
        for rank in range(size)
    ]
    params = [*shared, *(param for part in parts for param in part.values() if param.requires_grad)]
    optimizer = torch.optim.AdamW(params, **ADAM)
    norms = []
    for step, batch in enumerate(inputs(size)):
        optimizer.zero_grad()
        for rank in range(size):
            call = batch[rank].requires_grad_(), *layers_used(step, rank)
            torch.func.functional_call(module, parts[rank], call).backward()
        for param in shared:
            param.grad = None if param.grad is None else param.grad / size
        norms.append(float(nn.utils.clip_grad_norm_(params, CLIPPING)))
        optimizer.step()
    values = {name: value.detach() for name, value in module.state_dict().items()}
    values |= {name: torch.cat([part[name].detach() for part in parts]) for name in whole}
    return {"norms": norms, "values": values}

"""Functions that ranks execute."""

import dataclasses
import itertools
import math
import os
import time
import weakref
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.models import MODELS, Case
from tests.training import ADAM, make_config


@dataclasses.dataclass
class Task:
    """One training run."""

    model: str | Case
    """A name in MODELS, or a case."""
    precision: str = "fp32"
    steps: int = 5
    accumulate: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The section ``optimizer``."""
    on_host: bool = False
    swaps: bool = False
    """Between steps all values are read, overwritten and restored."""
    lends: bool = False
    """Between steps the device's memory is lent."""
    round_trips: bool = False
    """GPU round-trip updates from the second step on, in small pieces."""

    @property
    def case(self) -> Case:
        return self.model if isinstance(self.model, Case) else MODELS[self.model]

    def config(self) -> dict[str, Any]:
        config = make_config(self.precision, **self.options)
        config["optimizer"] |= self.optimizer
        if self.on_host:
            config["optimizer"]["params"]["use_hybrid_adam"] = False
        return config


def rank_and_size() -> tuple[int, int]:
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def train_tasks(tasks: list[Task]) -> list[dict[str, Any]]:
    if rank_and_size()[1] > 1:  # once for all engines
        dist.init_process_group("gloo")
    results = [train(task) for task in tasks]
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return results


def train(task: Task) -> dict[str, Any]:
    case = task.case
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(case.build, 0, task.config())
    with engine:
        engine.train()
        generator = torch.Generator().manual_seed(1)
        losses, norms = [], []
        for step in range(task.steps):
            if task.round_trips and step == 1:
                engine._session.runtime.set_round_trips([True] * engine._session.layout.num_chunks, 1024)
            optimizer.zero_grad()
            for _ in range(task.accumulate):
                loss = case.loss(engine(**rows(case.batch(generator))))
                engine.backward(loss / task.accumulate)
                losses.append(loss.item())
            optimizer.step()
            norms.append(engine.report()["grad_norm"])
            if task.lends:
                with engine.lend():
                    pass
            if task.swaps:
                swap(engine.module)
        return {"losses": losses, "norms": norms, "state": engine.state_dict(), "report": engine.report()}


@torch.no_grad()
def swap(module: nn.Module) -> None:
    params = list(module.parameters())
    kept = [param.clone() for param in params]
    for values in ([value * 0.99 for value in kept], kept):
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def rows(batch: dict[str, Any]) -> dict[str, Any]:
    """This rank's rows of a batch; four become two each for two ranks."""
    rank, size = rank_and_size()
    return {key: value.chunk(size)[rank] if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def train_plain(task: Task, size: int) -> dict[str, Any]:
    case = task.case
    torch.manual_seed(0)
    module = case.build()
    params = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, **ADAM)
    generator = torch.Generator().manual_seed(1)
    for _ in range(task.steps):
        optimizer.zero_grad()
        for _ in range(task.accumulate):
            batch = case.batch(generator)
            for rank in range(size):
                part = {k: v.chunk(size)[rank] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
                (case.loss(module(**part)) / (size * task.accumulate)).backward()
        clipping = task.options.get("gradient_clipping", 0)
        nn.utils.clip_grad_norm_(params, clipping if clipping > 0 else float("inf"))
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def train_plainly_for_all(build, num_steps: int, losses_of_step, clipping: float | None = None) -> dict[str, Any]:
    """AdamW on the mean of the ranks' losses, which ``losses_of_step(module, step)`` yields; losses are by rank."""
    torch.manual_seed(0)
    module = build()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAM)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        losses.append([])
        for loss in losses_of_step(module, step):
            loss.backward()
            losses[-1].append(loss.item())
        for param in module.parameters():
            if param.grad is not None:
                param.grad /= len(losses[-1])
        if clipping is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clipping)
        optimizer.step()
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return {"losses": [list(of_rank) for of_rank in zip(*losses, strict=True)], "state": state}


UNEVEN_ROWS = [(2, 2), (3, 1), (1, 3), (3, 1)]
"""Rows of the first and the second rank in each step."""


def uneven_rows(case: Case, generator: torch.Generator, counts: tuple[int, int]) -> list[dict[str, torch.Tensor]]:
    batches = [case.batch(generator) for _ in range(2)]
    rows = {key: torch.cat([batch[key] for batch in batches]).split(counts) for key in batches[0]}
    return [{key: values[rank] for key, values in rows.items()} for rank in range(2)]


def train_uneven() -> dict[str, Any]:
    rank, _ = rank_and_size()
    case = MODELS["gpt2"]
    torch.manual_seed(0)
    options = {"client": {"mem_tracer": {"use_fake_dist": True}}}  # both ranks on one device: here it is simulated
    engine, optimizer = initialize_engine(case.build, 0, make_config("fp32", gradient_clipping=1.0, **options))
    with engine:
        engine.train()
        generator = torch.Generator().manual_seed(1)
        losses = []
        for counts in UNEVEN_ROWS:
            optimizer.zero_grad()
            loss = case.loss(engine(**uneven_rows(case, generator, counts)[rank]))
            engine.backward(loss)
            losses.append(loss.item())
            optimizer.step()
        return {"losses": losses, "state": engine.state_dict()}


def train_uneven_plain() -> dict[str, Any]:
    case, generator = MODELS["gpt2"], torch.Generator().manual_seed(1)

    def losses(module, step):
        return (case.loss(module(**batch)) for batch in uneven_rows(case, generator, UNEVEN_ROWS[step]))

    return train_plainly_for_all(case.build, len(UNEVEN_ROWS), losses, clipping=1.0)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Linear(64, 64)
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.never = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](torch.relu(self.common(x))).square().mean()


def train_branches(options: dict[str, Any], on_host: bool, swap_at: int) -> dict[str, Any]:
    """Rank r uses branch r; from step ``swap_at`` on rank 0 uses branch 2 alone, for the first time. With ``on_host``
    updates run there and begin before the other ranks' gradients are known.
    """
    rank, size = rank_and_size()
    torch.manual_seed(0)
    config = make_config("fp32", **{"default_chunk_size": 4096, **options})
    if on_host:
        config["optimizer"] |= {"speculation": "always"}
        config["optimizer"]["params"]["use_hybrid_adam"] = False
    engine, optimizer = initialize_engine(Branches, 0, config)
    next_number = torch.rand(()).item()
    with engine:
        engine.train()
        generator = torch.Generator().manual_seed(1)
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(size, 8, 64, generator=generator)[rank]
            engine.backward(engine(x, 2 if rank == 0 and step >= swap_at else rank))
            optimizer.step()
        return {"state": engine.state_dict(), "report": engine.report(), "next_number": next_number}


def train_branches_plain(size: int, swap_at: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def losses(module, step):
        inputs = torch.randn(size, 8, 64, generator=generator)
        return (module(x, 2 if rank == 0 and step >= swap_at else rank) for rank, x in enumerate(inputs))

    return train_plainly_for_all(Branches, 6, losses)["state"]


def overflow_on_one_rank() -> dict[str, Any]:
    rank, _ = rank_and_size()
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(lambda: nn.Linear(64, 1), 0, make_config("fp16"))
    applied, scales = [], []
    with engine:
        engine.train()
        for step in range(4):
            x = torch.ones(4, 64)
            if rank == 1 and step == 1:
                x[0, 0] = 6e4
            optimizer.zero_grad()
            engine.backward(engine(x).float().square().mean() * (100.0 if rank == 1 and step == 1 else 1.0))
            optimizer.step()
            applied.append(engine.report()["num_skipped_steps"])
            scales.append(engine.report()["loss_scale"])
        return {"skipped": applied, "scales": scales, "state": engine.state_dict()}


class RunsOut(nn.Module):
    def __init__(self, failures: set[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.failures = failures
        self.calls = itertools.count(1)  # it goes on where a forward is run again, as an attribute would not

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call = next(self.calls)
        x = nn.functional.dropout(self.layers[1](torch.relu(self.layers[0](x))), 0.2)
        if call in self.failures:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.07 GiB.")
        return self.layers[3](torch.relu(self.layers[2](x))).square().mean()


def run_out(failures_of_last: set[int], limit: int | None, plans: str | bool = False) -> dict[str, Any]:
    rank, size = rank_and_size()
    torch.manual_seed(0)
    failures = failures_of_last if rank == size - 1 else set()
    config = make_config("fp32", default_chunk_size=4096, device_memory=limit, plan_cache=plans)
    engine, optimizer = initialize_engine(lambda: RunsOut(failures), 0, config)
    losses = []
    with engine:
        torch.manual_seed(rank)  # of dropout
        for step in range(4):
            optimizer.zero_grad()
            loss = engine(torch.randn(8, 64))
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            if step == 2:
                engine.eval()
                with torch.no_grad():
                    losses.append(engine(torch.ones(8, 64)).item())
                engine.train()
        return {
            "losses": losses,
            "state": engine.state_dict(),
            "calls": next(engine.module.calls) - 1,
            "replayed": engine.report()["num_replayed_accesses"],
        }


class LosingLinear(torch.autograd.Function):
    """Computes as a linear layer, but gives no gradients of the parameters in ``lost``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, lost: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.lost = lost
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_weight = None if ctx.lost == "weight and bias" else grad.t() @ x
        return grad @ weight, of_weight, None if "bias" in ctx.lost else grad.sum(0), None


class LosesGradients(nn.Module):
    def __init__(self, lost: str, losing_rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LosingLayer(64, 64) for _ in range(4))
        self.lost = lost if rank_and_size()[0] == losing_rank else ""
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for index, layer in enumerate(self.layers):
            x = torch.relu(layer(x, self.lost if self.calls > 3 and index == 2 else ""))
        return x.square().mean()


class LosingLayer(nn.Linear):
    def forward(self, x: torch.Tensor, lost: str) -> torch.Tensor:
        return LosingLinear.apply(x, self.weight, self.bias, lost)


LOSING_STEPS = 6


def losing_batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def lose_gradients(lost: str, losing_rank: int) -> dict[str, torch.Tensor]:
    rank, _ = rank_and_size()
    torch.manual_seed(0)
    config = make_config("fp32", default_chunk_size=4160, rank_timeout_seconds=20)  # a chunk for each layer
    engine, optimizer = initialize_engine(lambda: LosesGradients(lost, losing_rank), 0, config)
    with engine:
        for step in range(LOSING_STEPS):
            optimizer.zero_grad()
            engine.backward(engine(losing_batch(step, rank)))
            optimizer.step()
        return engine.state_dict()


def lose_gradients_plain(lost: str, losing_rank: int) -> dict[str, torch.Tensor]:
    def losses(module, step):
        for rank in range(2):
            module.lost, module.calls = lost if rank == losing_rank else "", step
            yield module(losing_batch(step, rank))

    return train_plainly_for_all(lambda: LosesGradients("", 0), LOSING_STEPS, losses)["state"]


def times_of_whole_model(release_after_init: bool, num_models: int) -> list[tuple[float, float]]:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = np.ones(1 << 20, dtype=np.float32)
            times.append([time.monotonic(), math.inf])
            weakref.finalize(values, lambda: times[-1].__setitem__(1, time.monotonic()))
            self.weight = nn.Parameter(torch.from_numpy(values))
            del values
            time.sleep(0.3)

    times: list[list[float]] = []
    config = make_config("fp32", release_after_init=release_after_init)
    dist.init_process_group("gloo")
    for _ in range(num_models):
        engine, _ = initialize_engine(Weighed, 0, config)
        with engine:
            assert torch.equal(engine.state_dict()["weight"], torch.ones(1 << 20))
    dist.barrier()
    dist.destroy_process_group()
    return [(begin, end) for begin, end in times]


def other_config() -> str:
    rank, _ = rank_and_size()
    initialize_engine(lambda: nn.Linear(8, 8), 0, make_config("fp32", gradient_clipping=1.0 + rank))
    return "no error"


def other_model() -> str:
    rank, _ = rank_and_size()
    initialize_engine(lambda: nn.Linear(8, 8 + rank), 0, make_config("fp32"))
    return "no error"


def shares_of_this_machine() -> dict[str, Any]:
    engine, _ = initialize_engine(lambda: nn.Linear(8, 8), 0, {})
    with engine:
        report = engine.report()
        return {key: report[key] for key in ("host_budget_bytes", "num_host_threads")}

"""Training runs that tests compare: through the engine, and with plain PyTorch."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from patrickstar import MemoryBudgetError
from patrickstar.runtime import initialize_engine
from patrickstar.sizes import parse_size
from tests.bits import assert_same_bits
from tests.models import Case

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}


@dataclasses.dataclass
class Run:
    losses: list[float]
    state: dict[str, torch.Tensor]
    report: dict[str, Any]
    grad_norms: list[float] = dataclasses.field(default_factory=list)
    chunk_reports: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def make_config(precision: str = "fp32", optimizer: str = "AdamW", **config: Any) -> dict[str, Any]:
    result = {"optimizer": {"type": optimizer, "params": dict(ADAM)}, "default_chunk_size": 64 * 1024, **config}
    if precision == "bf16":
        result["bf16"] = {"enabled": True}
    elif precision == "fp16":
        result["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8}
    return result


def make_host_config(precision: str, **config: Any) -> dict[str, Any]:
    """All optimizer states rest on the host."""
    result = make_config(precision, **config)
    result["optimizer"]["params"]["use_hybrid_adam"] = False
    return result


def train(
    case: Case,
    config: dict[str, Any],
    steps: int = 10,
    accumulate: int = 1,
    seed: int = 0,
    checkpointing: bool | None = None,
    before_step=None,
    model_parameters=None,
) -> Run:
    """``checkpointing`` is use_reentrant of Hugging Face's gradient checkpointing, or None for none.
    ``before_step(engine, step)`` is called before each step.
    """
    torch.manual_seed(seed)
    engine, optimizer = initialize_engine(case.build, 0, config, model_parameters=model_parameters)
    with engine:
        engine.train()
        if checkpointing is not None:
            engine.module.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        generator = torch.Generator().manual_seed(seed + 1)
        losses, norms, reports = [], [], []
        for step in range(steps):
            if before_step is not None:
                before_step(engine, step)
            optimizer.zero_grad()
            for _ in range(accumulate):
                loss = case.loss(engine(**case.batch(generator)))
                engine.backward(loss / accumulate if accumulate > 1 else loss)
                losses.append(loss.item())
            optimizer.step()
            norms.append(engine.report()["grad_norm"])
            reports.append(engine.report())
            del loss
        return Run(losses, engine.state_dict(), engine.report(), norms, reports)


_MOST_KEPT = 32
_kept: dict[Any, Any] = {}


def _once(function):
    """Keeps results by arguments."""

    @functools.wraps(function)
    def call(case: Case, config: Any, *args: Any, **kwargs: Any) -> Any:
        key = (function, case, repr(config), args, tuple(sorted(kwargs.items())))
        if key not in _kept:
            if len(_kept) == _MOST_KEPT:
                del _kept[next(iter(_kept))]
            _kept[key] = function(case, config, *args, **kwargs)
        return _kept[key]

    return call


train_once = _once(train)
"""Runs once for several tests that compare theirs with it."""


def go_on(case: Case, config: dict[str, Any], steps: int, folder: Any, *, load: bool, save: bool = False, look=None):
    """Trains from the checkpoint in ``folder``; states of model and optimizer. ``look(engine)`` is called first."""
    engine, optimizer = initialize_engine(case.build, 0, config)
    with engine:
        if look is not None:
            look(engine)
        if load:
            engine.load_checkpoint(folder)
        generator = torch.Generator().manual_seed(steps)
        for _ in range(steps):
            engine.backward(case.loss(engine(**case.batch(generator))))
            optimizer.step()
            optimizer.zero_grad()
        if save:
            engine.save_checkpoint(folder)
        return {"model": engine.state_dict(), "optimizer": optimizer.state_dict()}


def train_plain(
    case: Case,
    optimizer: str = "AdamW",
    steps: int = 10,
    accumulate: int = 1,
    seed: int = 0,
    clipping: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Run:
    torch.manual_seed(seed)
    module = case.build().to(dtype)
    module.train()
    optim = getattr(torch.optim, optimizer)([p for p in module.parameters() if p.requires_grad], **ADAM)
    generator = torch.Generator().manual_seed(seed + 1)
    losses, norms = [], []
    for _ in range(steps):
        optim.zero_grad()
        for _ in range(accumulate):
            loss = case.loss(module(**case.batch(generator)))
            (loss / accumulate if accumulate > 1 else loss).backward()
            losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clipping if clipping > 0 else float("inf"))))
        optim.step()
    return Run(losses, {name: value.detach().clone() for name, value in module.state_dict().items()}, {}, norms)


def least_named(error: object) -> int:
    """The least budget that an error or its text names; its short form with a unit is enough as well."""
    shown, exact = re.search(r"at least (\d[\d.]*\w+)(?: \((\d+) bytes\))?", str(error)).groups()
    enough = parse_size(shown)
    least = enough if exact is None else int(exact)
    assert least <= enough <= 1.01 * least
    return least


@_once
def least_device_memory(case: Case, config: dict[str, Any], steps: int = 1, **kwargs: Any) -> int:
    """The least device budget that works for ``steps``, by the bytes that errors name: those of the first step, and of
    a later step that needs more.
    """
    budget = 1
    for _ in range(8):
        try:
            train(case, {**config, "device_memory": budget}, steps=steps, **kwargs)
            return budget
        except (MemoryBudgetError, torch.OutOfMemoryError) as error:
            named = least_named(error)
            assert named > budget, f"the error names {named} bytes for a budget of {budget}: {error}"
            budget = named
    raise AssertionError(f"the errors' budgets do not come to an end at {budget} bytes")


def assert_same(one: Run, other: Run) -> None:
    """Every loss and every tensor have the same bits."""
    assert [loss.hex() for loss in one.losses] == [loss.hex() for loss in other.losses]  # NaN equals NaN
    assert_same_bits(one.state, other.state)


def relative_error(run: Run, reference: Run) -> float:
    """Norm of the difference of all floating point tensors over the norm of the reference's."""
    names = [name for name, value in reference.state.items() if value.is_floating_point()]
    difference = sum(float((run.state[n].double() - reference.state[n].double()).square().sum()) for n in names)
    total = sum(float(reference.state[n].double().square().sum()) for n in names)
    return (difference / total) ** 0.5


def num_committed(report: Mapping[str, Any]) -> int:
    """Updates that ran in backward for good."""
    ways = ("host_committed", "round_trip", "disk_committed", "device_committed")
    return sum(report[f"num_updates_{way}"] for way in ways)


def taken_over(report: Mapping[str, Any]) -> int:
    """Updates that began in backward and were the step's."""
    return report["num_updates_host_ahead"] + report["num_updates_host_two_passes_ahead"]


def two_passes(report: Mapping[str, Any]) -> int:
    """Updates whose states came behind the new values."""
    return report["num_updates_host_two_passes_ahead"] + report["num_updates_host_two_passes"]


def round_trips(report: Mapping[str, Any]) -> int:
    """GPU round-trip updates."""
    return report["num_updates_round_trip"]

"""Functions that ranks of an expert-parallel run execute."""

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from patrickstar.module.fused_experts import is_experts
from patrickstar.runtime import initialize_engine
from patrickstar.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from tests.ranks.mixed_models import batch, build
from tests.ranks.runs import rank_and_size
from tests.training import make_config

FAMILY = "Qwen3Moe"
NUM_STEPS = 4
PARALLEL = {"expert_parallel": {"size": 2}}
SCARCE = {"device_memory": "300KiB", "default_chunk_size": 1024}
SETTINGS: dict[str, dict[str, Any]] = {
    "shared": {},
    "divided": PARALLEL,
    "scarce": {**PARALLEL, **SCARCE},
    "on_host": {**PARALLEL, **SCARCE, "on_host": True},
}


@contextlib.contextmanager
def opened(settings: dict[str, Any], precision: str = "fp32", model: Any = None):
    torch.manual_seed(0)
    settings = dict(settings)
    on_host = settings.pop("on_host", False)
    config = make_config(precision, **{"gradient_clipping": 0.05, **settings})
    config["optimizer"]["params"]["use_hybrid_adam"] = not on_host
    engine, optimizer = initialize_engine(build(FAMILY) if model is None else model, 0, config)
    with engine:
        yield engine, optimizer


def step(engine: Any, optimizer: Any, index: int, rank: int) -> list[Any]:
    """Two micro-batches; in odd steps few tokens, so that experts of a rank may get none."""
    optimizer.zero_grad()
    losses = []
    for part in range(2):
        loss = engine(**batch(FAMILY, 10 * index + 2 * rank + part, index % 2 == 0, False), use_cache=False).loss
        engine.backward(loss / 2)
        losses.append(loss.item())
    optimizer.step()
    return [losses, engine.report()["grad_norm"]]


def train_each(precision: str, scarce: str = "300KiB", names: Sequence[str] = tuple(SETTINGS)) -> dict[str, Any]:
    """``scarce``: device memory of the runs that have little."""
    rank, _ = rank_and_size()
    dist.init_process_group("gloo")
    found = {}
    for name in names:
        settings = SETTINGS[name]
        if "device_memory" in settings:
            settings = {**settings, "device_memory": scarce}
        with opened(settings, precision) as (engine, optimizer):
            steps = [step(engine, optimizer, index, rank) for index in range(NUM_STEPS)]
            found[name] = {"steps": steps, "state": engine.state_dict(), "report": engine.report()}
    dist.barrier()
    dist.destroy_process_group()
    return found


def save_and_load(folder: Path) -> dict[str, Any]:
    """Checkpoints and state dicts of an expert-parallel engine, read by one and by others."""
    rank, size = rank_and_size()
    if size > 1:
        dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    settings = PARALLEL if size > 1 else {}
    with opened(settings) as (engine, optimizer):
        if size == 1:
            engine.load_checkpoint(folder / "divided")
            found["loaded"] = engine.state_dict()
        else:
            step(engine, optimizer, 0, rank)
            name, param = next((n, p) for n, p in engine.module.named_parameters() if "gate_up" in n)
            found["shape"], found["name"] = tuple(param.shape), name
            found["master"] = safe_get_full_fp32_param(param)
            found["moment"] = safe_get_full_optimizer_state(param, "exp_avg")
            found["saved"] = engine.state_dict()
            engine.save_checkpoint(folder / "divided")
            found["folder"] = engine.export_weights(folder / "weights", dtype=torch.float32)
            optimizer.zero_grad()
            engine.backward(engine(**batch(FAMILY, rank, True, False), use_cache=False).loss)
            found["gradient"] = safe_get_full_grad(param)
            found["own_gradient"] = param.grad.clone()
            optimizer.step()
            changed = engine.state_dict()
            assert not changed[name].equal(found["saved"][name])
            engine.load_state_dict(found["saved"])
            found["restored"] = engine.state_dict()
            states = copy.deepcopy(optimizer.state_dict())
            engine.load_checkpoint(folder / "divided")
            optimizer.load_state_dict(states)
            again = optimizer.state_dict()["state"]
            assert all(again[index]["exp_avg"].equal(state["exp_avg"]) for index, state in states["state"].items())
            engine.load_checkpoint(folder / "divided")
        found["then"] = [step(engine, optimizer, index, rank) for index in range(1, 3)] if size > 1 else None
        found["end"] = engine.state_dict()
        module = engine.module
    found["closed"] = {name: value.detach().clone() for name, value in module.state_dict().items()}
    found["loss_after"] = module(**batch(FAMILY, 5, True, False)).loss.item()
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
    return found


def start_from_meta() -> dict[str, Any]:
    """A model on the meta device gets the values that it gets without expert parallelism."""
    found = {}
    for name, settings in (("shared", {}), ("divided", PARALLEL)):
        with torch.device("meta"):
            model = build(FAMILY)()
        with opened(settings, model=model) as (engine, _):
            found[name] = engine.state_dict()
    return found


def start_again() -> list[Any]:
    """A start that fails leaves the model whole."""
    model = build(FAMILY)()
    try:
        with opened({**PARALLEL, "device_memory": "4KiB"}, model=model):
            pass
    except Exception as error:
        said = type(error).__name__
    implementations = {module.config._experts_implementation for module in model.modules() if is_experts(module)}
    loss = model(**batch(FAMILY, 0, True, False)).loss.item()
    with opened({}, model=model) as (engine, _):
        return [said, implementations, loss == engine(**batch(FAMILY, 0, True, False)).loss.item()]


def start_from_other_values() -> dict[str, torch.Tensor]:
    """Each rank builds a model of its own."""
    torch.manual_seed(rank_and_size()[0])
    with opened(PARALLEL, model=build(FAMILY)()) as (engine, _):
        return engine.state_dict()


def train_compiled() -> list[Any]:
    """Steps of a model whose blocks are compiled."""
    rank, _ = rank_and_size()
    with opened(PARALLEL) as (engine, optimizer):
        for layer in engine.module.model.layers:
            layer.compile(backend="eager")
        return [step(engine, optimizer, index, rank) for index in range(2)]


def call_once_more() -> None:
    """The second rank ends an epoch earlier."""
    rank, _ = rank_and_size()
    with opened({**PARALLEL, "rank_timeout_seconds": 20}) as (engine, optimizer):
        step(engine, optimizer, 0, rank)
        if rank == 0:
            engine.eval()
            with torch.no_grad():
                engine(**batch(FAMILY, 0, True, False))
        else:
            step(engine, optimizer, 1, rank)

"""Checkpoints from and to the tools themselves: DeepSpeed, torchtitan and FSDP2, on CPUs with gloo.

    python -m venv foreign && . foreign/bin/activate
    pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    pip install setuptools wheel ninja transformers
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed torchtitan
    python -m benchmark.foreign_tools

tests/checkpoint/foreign checks the same with files that tests write by the tools' rules. Here each tool writes and
reads its own files. A line says whether values and states have the same bits, and compares the losses of two more
steps. The first loss depends on values alone, the second on states too.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from patrickstar.runtime import initialize_engine
from tests.checkpoint.foreign.plain_run import ADAM, DECAYS, Net, batches, groups_of

KINDS = ("exp_avg", "exp_avg_sq")
OTHER = {**ADAM, "lr": 1.0}  # of an optimizer that loads: overwritten
STEPS, MORE = 3, 2
State = dict[str, dict[str, torch.Tensor]]


@dataclasses.dataclass
class Trained:
    """A run after :data:`STEPS` steps, and losses of :data:`MORE` more."""

    state: State
    """Master values and Adam's states by parameter."""
    losses: list[float]


def engine_of(dtype: str, params: dict[str, Any]) -> Any:
    """An engine of PatrickStar in this process."""
    torch.manual_seed(9)
    config = {"optimizer": {"type": "AdamW", "params": params}, "default_chunk_size": 1024, "steps_per_print": 0}
    config |= {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    return initialize_engine(Net, 0, config, model_parameters=groups_of)


def own_state(engine: Any, optimizer: Any) -> State:
    """Masters and states of an engine."""
    values = engine.state_dict()
    names = [name for group in groups_by_name() for name in group]
    states = optimizer.state_dict()["state"]
    return {
        name: {"fp32": values[name].float(), **{kind: states[index][kind] for kind in KINDS}}
        for index, name in enumerate(names)
    }


def groups_by_name() -> list[list[str]]:
    """Names of the trained parameters by group, in the optimizer's order."""
    trained = [(name, param.dim()) for name, param in Net().named_parameters() if param.requires_grad]
    return [[name for name, dim in trained if dim == 2], [name for name, dim in trained if dim != 2]]


def own_steps(engine: Any, optimizer: Any, number: int, seed: int) -> list[float]:
    """Losses of some steps of an engine."""
    losses = []
    for tokens in batches(number, seed):
        loss = engine(tokens)
        engine.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def export(folder: Path, dtype: str) -> Trained:
    """Trains an engine, and exports it in both formats below ``folder``."""
    engine, optimizer = engine_of(dtype, ADAM)
    with engine:
        own_steps(engine, optimizer, STEPS, 1)
        engine.export_checkpoint(folder / "universal" / "global_step3", "universal", {"epoch": 3})
        engine.export_checkpoint(folder / "dcp" / "step-3", "dcp", {"epoch": 3})
        state = own_state(engine, optimizer)
        return Trained(state, own_steps(engine, optimizer, MORE, 2))


def load(folder: Path, dtype: str) -> Trained:
    """Loads a checkpoint of another tool into an engine, and trains on."""
    engine, optimizer = engine_of(dtype, OTHER)
    with engine:
        engine.load_checkpoint(folder)
        state = own_state(engine, optimizer)
        return Trained(state, own_steps(engine, optimizer, MORE, 2))


# DeepSpeed. All ranks have the same batches, so that averages over ranks are exact.


def deepspeed_engine(stage: int, dtype: str, ranks: int, params: dict[str, Any], **checkpoint: Any) -> Any:
    """An engine of DeepSpeed."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(9)  # frozen parameters, which universal checkpoints do not give back
    model = Net()
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}  # with DeepSpeedCPUAdam
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 4 * ranks,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": params},
        "checkpoint": checkpoint,
        "bf16": {"enabled": dtype == "bf16"},
        "gradient_clipping": 0.0,
    }
    return deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)[0]


def deepspeed_steps(engine: Any, number: int, seed: int) -> list[float]:
    """Losses of some steps."""
    losses = []
    for tokens in batches(number, seed):
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def deepspeed_state(engine: Any) -> State:
    """Masters and states by DeepSpeed's own inspection."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # states of a foreign optimizer are made late
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    return {
        name: {
            "fp32": safe_get_full_fp32_param(param).detach().clone(),
            **{kind: safe_get_full_optimizer_state(param, kind).detach().clone() for kind in KINDS},
        }
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }


def deepspeed_saves(ranks: int, folder: Path, stage: int, dtype: str) -> Trained:
    """A checkpoint of DeepSpeed below ``folder``, and what it has."""
    engine = deepspeed_engine(stage, dtype, ranks, ADAM)
    deepspeed_steps(engine, STEPS, 1)
    engine.save_checkpoint(str(folder))
    state = deepspeed_state(engine)
    return Trained(state, deepspeed_steps(engine, MORE, 2))


def deepspeed_loads(ranks: int, folder: Path, stage: int, dtype: str) -> Trained:
    """A universal checkpoint, loaded by DeepSpeed."""
    if stage == 3:  # opens a file for each rank (docs/checkpoints.md)
        states = next(folder.glob("*/mp_rank_00_model_states.pt"))
        shutil.copy(states, states.with_name(f"zero_pp_rank_{os.environ['RANK']}_mp_rank_00_model_states.pt"))
    engine = deepspeed_engine(stage, dtype, ranks, OTHER, load_universal=True)
    path, client_state = engine.load_checkpoint(str(folder))
    if path is None or client_state["epoch"] != 3 or engine.global_steps != STEPS:
        raise RuntimeError(f"DeepSpeed loaded {path} with {client_state}")
    state = deepspeed_state(engine)
    return Trained(state, deepspeed_steps(engine, MORE, 2))


# torchtitan's checkpoint manager, with FSDP2 on several ranks.


def titan(folder: Path, params: dict[str, Any], ranks: int) -> tuple[Any, Any, Any, Any]:
    """Model, optimizers, training state and checkpoint manager."""
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(5)
    model = Net()
    if ranks > 1:
        fully_shard(model)
    patterns = ["|".join(name.replace(".", r"\.") for name in names) for names in groups_by_name()]
    groups = [
        ParamGroupConfig(
            pattern=f"^({pattern})$", optimizer_name="AdamW", optimizer_kwargs={**params, "weight_decay": decay}
        )
        for pattern, decay in zip(patterns, DECAYS, strict=True)
    ]
    optimizers = OptimizersContainer(
        OptimizersContainer.Config(param_groups=groups, implementation="for-loop"), model_parts=[model]
    )
    schedules = LRSchedulersContainer(optimizers, lambda step: 1.0)
    train_state = TrainState()
    manager = CheckpointManager(
        CheckpointManager.Config(
            enable=True, folder=folder.name, interval=1, keep_latest_k=0, last_save_model_only=False,
            exclude_from_loading=["dataloader", "lr_scheduler"],
        ),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedules,
        states={"train_state": train_state},
        sd_adapter=None,
        base_folder=str(folder.parent),
    )  # fmt: skip
    return model, optimizers, train_state, manager


class TrainState:
    """The part of torchtitan's Trainer that its checkpoints hold under ``train_state``."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """Trainer.state_dict()."""
        return {"step": self.step, "ntokens_seen": 24 * self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Trainer.load_state_dict()."""
        self.step = state["step"]


def titan_steps(model: Any, optimizers: Any, number: int, seed: int) -> list[float]:
    """Losses of some steps."""
    losses = []
    for tokens in batches(number, seed):
        optimizers.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizers.step()
        losses.append(loss.item())
    return losses


def titan_state(model: Any, optimizers: Any) -> State:
    """Values and states, gathered from all ranks."""

    def whole(value: Any) -> torch.Tensor:
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.detach().clone()

    states = optimizers.state_dict()
    return {
        name: {"fp32": whole(param), **{kind: whole(states[f"state.{name}.{kind}"]) for kind in KINDS}}
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def titan_saves(ranks: int, folder: Path) -> Trained:
    """A checkpoint of torchtitan in ``folder``."""
    model, optimizers, train_state, manager = titan(folder, ADAM, ranks)
    titan_steps(model, optimizers, STEPS, 1)
    train_state.step = STEPS
    manager.save(STEPS, last_step=True)
    state = titan_state(model, optimizers)
    return Trained(state, titan_steps(model, optimizers, MORE, 2))


def titan_loads(ranks: int, folder: Path) -> Trained:
    """A DCP checkpoint, loaded by torchtitan."""
    model, optimizers, train_state, manager = titan(folder, OTHER, ranks)
    if not manager.load() or train_state.step != STEPS:
        raise RuntimeError(f"torchtitan loaded step {train_state.step}")
    state = titan_state(model, optimizers)
    return Trained(state, titan_steps(model, optimizers, MORE, 2))


# Ranks, and the table.


def _rank(rank: int, ranks: int, port: int, result: str, job: Callable[..., Trained], arguments: tuple[Any, ...]):
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in where.items()})
    torch.set_num_threads(1)
    trained = job(ranks, *arguments)
    if rank == 0:
        torch.save(dataclasses.asdict(trained), result)


def on_ranks(ranks: int, job: Callable[..., Trained], *arguments: Any) -> Trained:
    """Runs ``job(ranks, *arguments)`` on ranks, and returns the first one's result."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        result = f"{folder}/result.pt"
        mp.spawn(_rank, args=(ranks, port, result, job, arguments), nprocs=ranks)
        return Trained(**torch.load(result))


def compare(name: str, found: Trained, expected: Trained) -> bool:
    """Prints a line; True if bits of values and states and the first loss are equal, and the second loss nearly."""
    different = [
        f"{param} {kind}"
        for param, held in expected.state.items()
        for kind, value in held.items()
        if not torch.equal(found.state[param][kind].reshape(-1), value.reshape(-1))
    ]
    bits = "same bits" if not different else f"DIFFERENT: {', '.join(different[:3])} and {len(different)} in all"
    gaps = [abs(own - other) / abs(other) for own, other in zip(found.losses, expected.losses, strict=True)]
    print(f"| {name} | {bits} | {', '.join('same' if gap == 0 else f'{gap:.0e}' for gap in gaps)} |", flush=True)
    return not different and gaps[0] <= 1e-6 and gaps[1] <= 1e-6


def main() -> None:
    """Exits with 1 if a line differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    only = parser.parse_args().only
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torchtitan

    del torchtitan
    from importlib.metadata import version

    print(
        f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, torchtitan {version('torchtitan')}; CPU, gloo\n"
    )
    print("| from, to | values and Adam's states | next two losses, relative difference |\n|---|---|---|")
    well = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = {dtype: export(folder / dtype, dtype) for dtype in ("fp32", "bf16")}
        for dtype in ("fp32", "bf16"):
            for stage in (1, 2, 3):
                for ranks in (1, 2):
                    title = f"DeepSpeed ZeRO-{stage}, {dtype}, {ranks} ranks → PatrickStar"
                    target = folder / title
                    if only in title:
                        saved = on_ranks(ranks, deepspeed_saves, target, stage, dtype)
                        well &= compare(title, load(target, dtype), saved)
                    title = f"PatrickStar → universal → DeepSpeed ZeRO-{stage}, {dtype}, {ranks} ranks"
                    if only in title:
                        found = on_ranks(ranks, deepspeed_loads, folder / dtype / "universal", stage, dtype)
                        well &= compare(title, found, own[dtype])
        for ranks in (1, 2):
            kind = "plain" if ranks == 1 else "FSDP2, 2 ranks"
            title = f"torchtitan, {kind} → PatrickStar"
            target = folder / title
            if only in title:
                saved = on_ranks(ranks, titan_saves, target)
                well &= compare(title, load(target / f"step-{STEPS}", "fp32"), saved)
            title = f"PatrickStar → DCP → torchtitan, {kind}"
            if only in title:
                well &= compare(title, on_ranks(ranks, titan_loads, folder / "fp32" / "dcp"), own["fp32"])
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()

"""Runs with torchtitan's checkpoint manager, with FSDP2 on several ranks."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import torch

from benchmark.foreign_tools.runs import KINDS, MORE, OTHER, STEPS, State, Trained, groups_by_name
from tests.checkpoint.foreign.plain_run import ADAM, DECAYS, Net, batches


class Precision(enum.Enum):
    """Types of a run's values."""

    FP32 = "float32"
    MIXED = "mixed precision"
    """FSDP2's: sharded values in float32, computation in bfloat16."""
    BF16 = "bfloat16"
    """All values and states, torchtitan's ``training.dtype``."""

    @property
    def dtype(self) -> str:
        """Type of PatrickStar's parameters for the same run."""
        return "fp32" if self is Precision.FP32 else "bf16"


def parts_of(folder: Path, params: dict[str, Any], ranks: int, precision: Precision) -> tuple[Any, Any, Any, Any]:
    """Model, optimizers, training state and checkpoint manager."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer.optimizer import OptimizersContainer, ParamGroupConfig

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(5)
    model = Net().to(torch.bfloat16 if precision is Precision.BF16 else torch.float32)
    if ranks > 1:
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mp_policy=mixed if precision is Precision.MIXED else MixedPrecisionPolicy())
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


def steps(model: Any, optimizers: Any, number: int, seed: int) -> list[float]:
    """Losses of some steps."""
    losses = []
    for tokens in batches(number, seed):
        optimizers.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizers.step()
        losses.append(loss.item())
    return losses


def state_of(model: Any, optimizers: Any) -> State:
    """Values and states, gathered from all ranks."""

    def whole(value: Any) -> torch.Tensor:
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.detach().float().clone()

    states = optimizers.state_dict()
    return {
        name: {"fp32": whole(param), **{kind: whole(states[f"state.{name}.{kind}"]) for kind in KINDS}}
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def saved(ranks: int, folder: Path, precision: Precision) -> Trained:
    """A checkpoint of torchtitan in ``folder``."""
    model, optimizers, train_state, manager = parts_of(folder, ADAM, ranks, precision)
    steps(model, optimizers, STEPS, 1)
    train_state.step = STEPS
    manager.save(STEPS, last_step=True)
    return Trained(state_of(model, optimizers), steps(model, optimizers, MORE, 2))


def loaded(ranks: int, folder: Path, precision: Precision) -> Trained:
    """A DCP checkpoint, loaded by torchtitan."""
    model, optimizers, train_state, manager = parts_of(folder, OTHER, ranks, precision)
    if not manager.load() or train_state.step != STEPS:
        raise RuntimeError(f"torchtitan loaded step {train_state.step}")
    return Trained(state_of(model, optimizers), steps(model, optimizers, MORE, 2))

"""Runs of DeepSpeed. All ranks have the same batches, so that averages over ranks are exact."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmark.foreign_tools.runs import KINDS, MORE, OTHER, STEPS, State, Trained
from tests.checkpoint.foreign.plain_run import ADAM, Net, batches, groups_of


@dataclasses.dataclass(frozen=True)
class Setup:
    """A configuration of DeepSpeed's."""

    name: str
    stage: int
    dtype: str
    """Type of PatrickStar's parameters: "fp32" or "bf16"."""
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of the configuration."""
    offloads: bool = True
    """Optimizer states on the CPU, by DeepSpeedCPUAdam; False: FusedAdam."""

    @property
    def keeps_groups(self) -> bool:
        """False where a universal checkpoint gives all groups the options of the first: DeepSpeed's stage3.py."""
        return self.stage != 3


SETUPS = [
    *(
        Setup(f"ZeRO-{stage}, {dtype}", stage, dtype, {"bf16": {"enabled": dtype == "bf16"}})
        for dtype in ("fp32", "bf16")
        for stage in (1, 2, 3)
    ),
    Setup(  # DeepSpeed's BF16_Optimizer
        "ZeRO-1, bf16 with float32 gradients",
        1,
        "bf16",
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        offloads=False,
    ),
]
HALF = Setup(
    "ZeRO-2, bf16 with bf16 masters and states",
    2,
    "bf16",
    {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
)


def engine_of(setup: Setup, ranks: int, params: dict[str, Any], **checkpoint: Any) -> Any:
    """An engine of DeepSpeed."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(9)  # frozen parameters, which universal checkpoints do not give back
    model = Net()
    zero: dict[str, Any] = {"stage": setup.stage}
    zero |= {"offload_optimizer": {"device": "cpu"}} if setup.offloads else {}
    zero |= {"memory_efficient_linear": False} if setup.stage == 3 else {}  # else its own, which rounds otherwise
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 4 * ranks,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": params},
        "checkpoint": checkpoint,
        "gradient_clipping": 0.0,
        **setup.more,
    }
    return deepspeed.initialize(model=model, model_parameters=groups_of(model), config=config)[0]


def steps(engine: Any, number: int, seed: int) -> list[float]:
    """Losses of some steps."""
    losses = []
    for tokens in batches(number, seed):
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def state_of(engine: Any) -> State:
    """Masters and states by DeepSpeed's own inspection."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # states of a foreign optimizer are made late
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    return {
        name: {
            "fp32": safe_get_full_fp32_param(param).detach().float().clone(),
            **{kind: safe_get_full_optimizer_state(param, kind).detach().float().clone() for kind in KINDS},
        }
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }


def saved(ranks: int, folder: Path, setup: Setup) -> Trained:
    """A checkpoint of DeepSpeed below ``folder``, and what it has."""
    engine = engine_of(setup, ranks, ADAM)
    steps(engine, STEPS, 1)
    engine.save_checkpoint(str(folder))
    return Trained(state_of(engine), steps(engine, MORE, 2))


def loaded(ranks: int, folder: Path, setup: Setup) -> Trained:
    """A universal checkpoint, loaded by DeepSpeed."""
    if setup.stage == 3:  # opens a file for each rank (docs/checkpoints.md)
        states = next(folder.glob("*/mp_rank_00_model_states.pt"))
        shutil.copy(states, states.with_name(f"zero_pp_rank_{os.environ['RANK']}_mp_rank_00_model_states.pt"))
    engine = engine_of(setup, ranks, OTHER, load_universal=True)
    path, client_state = engine.load_checkpoint(str(folder))
    if path is None or client_state["epoch"] != 3 or engine.global_steps != STEPS:
        raise RuntimeError(f"DeepSpeed loaded {path} with {client_state}")
    return Trained(state_of(engine), steps(engine, MORE, 2))


def convert(folder: Path, target: Path) -> None:
    """Makes a universal checkpoint of a checkpoint below ``folder``, by DeepSpeed's own tool."""
    source = folder / (folder / "latest").read_text()
    module = "deepspeed.checkpoint.ds_to_universal"
    arguments = ["--input_folder", str(source), "--output_folder", str(target), "--inject_missing_state"]
    arguments += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, stdout=sys.stderr)

"""Sequences and meshes of four ranks on two nodes."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.ranks import on_mesh, sharded
from tests.ranks.in_turn import train_in_turn
from tests.ranks.on_mesh import MeshRun
from tests.ranks.sharded import Model, Run

LLAMA = Model("llama")
RUNS = {
    "hybrid": Run(LLAMA, "left", size=4, mode="hybrid"),
    "2 x 2": MeshRun(LLAMA, rows=2, columns=2),
    "1d x data": MeshRun(LLAMA, columns=2, mode="1d"),
    "columns x sequence": MeshRun(LLAMA, columns=2, sequence=2, sequence_mode="ring"),
}


def train(run: Run | MeshRun) -> dict[str, Any]:
    result = sharded.train(run) if isinstance(run, Run) else on_mesh.train(run)
    return {**result, "local": (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"])}


def train_each() -> dict[str, dict[str, Any]]:
    return dict(zip(RUNS, train_in_turn(train, list(RUNS.values())), strict=True))


def write_results(folder: str) -> None:
    torch.set_num_threads(1)
    Path(folder, os.environ["RANK"]).write_bytes(pickle.dumps(train_each()))


def launch_on_a_node(folder: str) -> None:
    """Launches two of four ranks by what the command torchrun calls, as forks, which need not import anything."""
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=2,
        run_id="two nodes",
        rdzv_backend="static",
        rdzv_endpoint=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        rdzv_configs={"rank": int(os.environ["RANK"])},
        local_addr=os.environ["MASTER_ADDR"],
        start_method="fork",
        monitor_interval=0.05,
    )
    elastic_launch(config, write_results)(folder)

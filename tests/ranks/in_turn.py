import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

_Run = TypeVar("_Run")


def train_in_turn(train: Callable[[_Run], dict[str, Any]], runs: Sequence[_Run]) -> list[dict[str, Any]]:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    results = [train(run) for run in runs]
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return results

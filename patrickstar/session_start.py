"""Starts a session: ranks, budgets, the model into chunks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from patrickstar.config import Config
from patrickstar.distributed import RankGroups, open_ranks
from patrickstar.groups import ModelParameters, make_groups
from patrickstar.materialize import DeferredInit
from patrickstar.memory import make_budgets
from patrickstar.preprocess import build_module
from patrickstar.rank_sync import check_same_config, common_budgets, common_random_numbers, take_turns
from patrickstar.session import Session


def start_session(
    model_func: Callable[[], nn.Module], local_rank: int, config: Config, model_parameters: ModelParameters
) -> tuple[Session, list[dict[str, Any]]]:
    """A session for the model that ``model_func`` returns, and the optimizer's groups; the arguments and errors are
    those of ``initialize_engine``.
    """
    ranks = _open_ranks(local_rank, config)
    session = None
    try:
        check_same_config(ranks, config)
        here = ranks.context
        budgets = common_budgets(ranks, make_budgets(config, here.device, here.local_world_size))
        with common_random_numbers(ranks), take_turns(ranks, config) as turn:
            module = build_module(model_func)
            deferred = DeferredInit.of(module)
            if deferred is not None:
                turn.end()  # it takes no memory
            groups = make_groups(module, model_parameters, {} if deferred is None else deferred.replaced)
            session = Session(module, config, ranks, budgets, deferred)
        session.join()
    except BaseException as error:
        if session is not None:
            session.leave(error)
        else:
            ranks.__exit__(type(error), error, None)
        raise
    return session, groups


def _open_ranks(local_rank: int, config: Config) -> RankGroups:
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1 or (dist.is_available() and dist.is_initialized())
    if several and local_rank == 0:  # not said: torchrun knows
        local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    device = _device(local_rank)
    if several and device.type == "cuda":
        _check_one_gpu_per_rank(config)
    ranks = open_ranks(
        device_type=device.type, timeout_seconds=config.rank_timeout_seconds, local_rank=local_rank if several else None
    )
    if len(ranks.members) == 1:
        ranks.context = dataclasses.replace(ranks.context, device=device)
    return ranks


def _check_one_gpu_per_rank(config: Config) -> None:
    if config.client.mem_tracer.use_fake_dist:
        raise ValueError(
            "client.mem_tracer.use_fake_dist puts the ranks of this run on one GPU, but NCCL wants a GPU for each; "
            "leave it out, or try several ranks without a GPU (CUDA_VISIBLE_DEVICES= simulates a device for each)"
        )


def _device(local_rank: int) -> torch.device:
    if isinstance(local_rank, bool) or not isinstance(local_rank, int) or local_rank < 0:
        raise ValueError(f"local_rank is {local_rank!r}; give the index of a GPU on this machine, 0 or more")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local_rank is {local_rank}, but this machine has {torch.cuda.device_count()} GPUs; give less"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)

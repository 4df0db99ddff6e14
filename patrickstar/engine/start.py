"""Start of a session: ranks, budgets, and the move of the model into chunks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from patrickstar import _C
from patrickstar.activations.remedies import check_activations
from patrickstar.config import Config, rule_of
from patrickstar.machine.budgets import make_budgets
from patrickstar.module.compiled.units import check_compiled
from patrickstar.module.first_rank_values import FirstRankValues, check_same_model
from patrickstar.module.fp8_layers import check_fp8
from patrickstar.module.materialize import DeferredInit
from patrickstar.module.preprocess import ModelSource, build_module
from patrickstar.module.quantization import is_quantized
from patrickstar.optimizer.groups import ModelParameters, make_groups
from patrickstar.parallel.axes import mesh_of
from patrickstar.parallel.proof import prove_rewrites
from patrickstar.parallel.sharded_matrices import Matrices, make_matrices
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.ranks.distributed import RankGroups, join_ranks
from patrickstar.ranks.mesh import Axis, MeshRanks
from patrickstar.sequence.survey import Survey
from patrickstar.session.closing import abandon_session, revert_session
from patrickstar.session.core_setup import load_plan
from patrickstar.session.error_texts import explain_other_engines
from patrickstar.session.lifecycle import complete, make_session
from patrickstar.session.rank_sync import (
    check_same_config,
    common_budgets,
    common_random_numbers,
    failed_ranks,
    first_ranks_survey,
    take_turns,
)
from patrickstar.session.registry import close_lost_engine, drop_unreachable_sessions, open_sessions
from patrickstar.session.session import Session


def start_session(
    model_func: ModelSource, local_rank: int, config: Config, model_parameters: ModelParameters
) -> tuple[Session, list[dict[str, Any]]]:
    """A session for the model, and the optimizer's groups. Arguments and errors are those of ``initialize_engine``.

    The caller makes an engine of it within :func:`opening`.
    """
    drop_unreachable_sessions()
    ranks = _join_ranks(local_rank, config)
    session: Session | None = None
    deferred: DeferredInit | None = None
    matrices: Matrices | None = None
    try:
        with ranks.guard("opening the engine"):
            check_same_config(ranks, config)
            mesh = MeshRanks(ranks, mesh_of(config, len(ranks.members)))
            _check_sharing(ranks, config)
            chunk_ranks = ChunkRanks.along(mesh, Axis.DATA, Axis.SEQUENCE, num_parts=config.expert_parallel.size)
            matrices = make_matrices(config, mesh)
            here = ranks.context
            mine = make_budgets(config, here.device, here.local_world_size, here.num_device_ranks)
            budgets = common_budgets(ranks, mine)  # from here on ranks take memory
            saved_plan = load_plan(config, ranks)
        with common_random_numbers(ranks), take_turns(ranks, config) as turn:
            with _C.HostAllocations():  # host memory, even if another engine simulates a device
                built = build_module(model_func, release=close_lost_engine)
            survey = Survey()
            if ranks.context.rank == ranks.members[0]:
                survey = prove_rewrites(built.module, config, matrices.mode_for(built.module))
            sharded = matrices.divide(built.module)
            deferred = DeferredInit.of(built.module)
            options = rule_of(config.optimizer.type).options
            groups = make_groups(built.module, model_parameters, _replaced(sharded, deferred), options=options)
            in_groups = {param for group in groups for param in group["params"]}
            _check_module(built.module, config, matrices, here.device)
            session = make_session(built.module, config, mesh, chunk_ranks, matrices, budgets, in_groups, deferred)
            if saved_plan is not None:
                saved_plan.check_layout(session.layout, str(config.plan))
            values = FirstRankValues(chunk_ranks, session.params)
            # Newly allocated parameters move into chunks before the next rank of this machine builds its model.
            if built.is_new and deferred is None and chunk_ranks.rank > 0:
                values.take_all()
            turn.end()
            with ranks.guard("moving the model into chunks"):
                check_same_model(ranks, session.plan_of_params)
                matrices.check_same_values()
                values.share()
                session.survey = first_ranks_survey(ranks, survey)
        with ranks.guard("opening the engine"):
            complete(session, saved_plan)
    except BaseException as error:
        if session is not None:
            abandon_session(session, error)
        else:
            if matrices is not None:
                matrices.undo()
            ranks.leave(error)
        explain_other_engines(error, len(open_sessions()))
        if deferred is not None:
            deferred.undo()
        raise
    return session, groups


def _check_module(module: nn.Module, config: Config, matrices: Matrices, device: torch.device) -> None:
    """Raises ValueError if the module cannot be trained with ``config`` on ``device``."""
    check_compiled(module)
    check_fp8(module, config.fp8, device)
    check_activations(module, config.activations)
    if matrices.names is not None and is_quantized(module, config.quantization):
        raise ValueError(
            "quantization is not supported with tensor_parallel: blocks of matrices keep the compute dtype; leave "
            "out one of them"
        )


def _replaced(
    sharded: Mapping[nn.Parameter, nn.Parameter], deferred: DeferredInit | None
) -> Mapping[nn.Parameter, nn.Parameter]:
    """Maps the module's former parameters to their final replacements, through sharding and deferred initialisation."""
    if deferred is None:
        return sharded
    return {**deferred.replaced, **{old: deferred.replaced.get(new, new) for old, new in sharded.items()}}


@contextlib.contextmanager
def opening(session: Session) -> Iterator[None]:
    """Wraps the making of an engine from a new session. If it fails on any rank, all ranks get their module back.

    Raises:
        RankFailure: another rank failed; the message has its error.
    """
    failure: Exception | None = None
    try:
        try:
            yield
        except Exception as error:
            failure = error
        with session.ranks.guard("opening the engine"):
            failed = failed_ranks(session.ranks, failure)
    except BaseException as error:
        abandon_session(session, error)
        raise
    if failed:
        revert_session(session)
        raise failure if failure is not None else _C.RankFailure(f"the engine was not opened: {failed}")


def _join_ranks(local_rank: int, config: Config) -> RankGroups:
    several = int(os.environ.get("WORLD_SIZE") or 1) > 1 or (dist.is_available() and dist.is_initialized())
    if several and local_rank == 0:  # the default: take torchrun's
        local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    device = _device(local_rank, config)
    return join_ranks(
        device_type=device.type,
        timeout_seconds=config.rank_timeout_seconds,
        local_rank=local_rank if several else None,
        device_index=device.index,
    )


def _check_sharing(ranks: RankGroups, config: Config) -> None:
    here = ranks.context
    if here.num_device_ranks > 1 and not config.client.mem_tracer.use_fake_dist:
        raise ValueError(
            f"{here.num_device_ranks} ranks of this run compute on one GPU ({here.device} of rank {here.rank}); let "
            "each see one of its own (CUDA_VISIBLE_DEVICES, local_rank), or set client.mem_tracer.use_fake_dist, with "
            "which ranks share GPUs through the host"
        )


def _device(local_rank: int, config: Config) -> torch.device:
    if isinstance(local_rank, bool) or not isinstance(local_rank, int) or local_rank < 0:
        raise ValueError(f"local_rank is {local_rank!r}; give the index of a GPU on this machine, 0 or more")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    index = local_rank % num_devices if config.client.mem_tracer.use_fake_dist else local_rank
    if index >= num_devices:
        raise ValueError(
            f"local_rank is {local_rank}, but this process sees {num_devices} GPUs; give less, start as many ranks as "
            "there are GPUs, or set client.mem_tracer.use_fake_dist, with which ranks share GPUs through the host"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)

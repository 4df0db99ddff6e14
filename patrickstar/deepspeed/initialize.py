"""``patrickstar.initialize``: an engine from a DeepSpeed script's arguments."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from patrickstar.config import (
    Config,
    Dialect,
    OptimizerConfig,
    log_accepted_options,
    parse_config,
    resolve_batch_sizes,
)
from patrickstar.deepspeed.arguments import choose_config
from patrickstar.deepspeed.data import make_loader
from patrickstar.deepspeed.engine import TrainingEngine
from patrickstar.deepspeed.schedule import choose_scheduler
from patrickstar.elastic.run import joins_others
from patrickstar.engine.optim import HybridOptimizer, make_optimizer
from patrickstar.engine.optimizer_takeover import groups_of, move_state
from patrickstar.engine.run_log import begin_run_log, make_monitor
from patrickstar.engine.start import opening, start_session
from patrickstar.module.preprocess import ModelSource
from patrickstar.monitor import MonitorOptions, show_log
from patrickstar.optimizer.groups import ModelParameters
from patrickstar.ranks.world import num_ranks_to_come

logger = logging.getLogger("patrickstar")

_UNUSED_ARGUMENTS = {
    "distributed_port": (29500, "ranks find each other through the environment that torchrun sets"),
    "mpu": (None, 'ranks that share sequences are said by mesh_param, or by "sequence_parallel" in the configuration'),
}


def initialize(
    args: Any = None,
    model: ModelSource | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    model_func: ModelSource | None = None,
) -> tuple[TrainingEngine, HybridOptimizer, DataLoader[Any] | None, Any]:
    """Builds an engine from a DeepSpeed script's arguments; the model is converted in place.

    Args:
        args: of the command line, with ``deepspeed_config`` (:func:`add_config_arguments`) and ``local_rank``.
        model: the module, or a function without arguments that returns it (as ``model_func``): a model built on the
            meta device is then never whole in memory.
        optimizer: the user's ``torch.optim.AdamW``, ``Adam`` or ``SGD``, taken over with its state, or a class or
            function that makes one from ``model_parameters``. None: the configuration's.
        model_parameters: parameters, groups (dicts with ``params``), or an argument of ``initialize_engine``. None:
            all. Others of the model are not trained.
        training_data: a dataset, for which a loader of micro-batches is made.
        lr_scheduler: a schedule of the user's optimizer, or a function that makes one from an optimizer. None: the
            configuration's.
        distributed_port, mpu: accepted at their defaults.
        mesh_param: (ranks with other data, ranks that share each sequence); the latter equals the configuration's
            ``sequence_parallel.size``.
        dist_init_required: accepted and ignored; ranks are detected.
        collate_fn: makes a batch from samples, for the loader.
        config: a DeepSpeed configuration: a dict or the path of a JSON file (docs/config.md lists the keys).
        config_params: its old name.
        model_func: see ``model``.

    Returns:
        the engine, its optimizer, the loader or None, the schedule or None.

    Raises:
        ValueError: an argument or a key of the configuration is wrong; nothing was started.
        MemoryBudgetError: the model does not fit into the budgets.
    """
    _check_unused({"distributed_port": distributed_port, "mpu": mpu})
    show_log()
    build = _model_func(model, model_func)
    parsed = _with_mesh(parse_config(choose_config(args, config, config_params), Dialect.DEEPSPEED), mesh_param)
    log_accepted_options(parsed)
    ranks_per_sample = parsed.ranks_per_sample
    sizes = resolve_batch_sizes(parsed, max(num_ranks_to_come() // ranks_per_sample, 1))
    parsed = parsed.model_copy(update={"gradient_accumulation_steps": sizes.accumulation_steps})
    if isinstance(model_parameters, Iterable):
        model_parameters = list(model_parameters)  # a generator is read twice below
    groups: ModelParameters = _groups(model_parameters)
    theirs = _their_optimizer(optimizer, model, model_parameters)
    if theirs is not None:
        taken = groups_of(theirs)
        parsed = _with_optimizer(parsed, taken.type, taken.defaults)
        groups = _returning(taken.groups)
    local_rank = getattr(args, "local_rank", None)
    session, made_groups = start_session(build, max(local_rank or 0, 0), parsed, groups)
    with opening(session):
        own = make_optimizer(session, made_groups, parsed)
        if theirs is not None:
            move_state(theirs, own)  # before the schedule, which sets the first step's rates
        schedule = choose_scheduler(parsed, lr_scheduler, own)
        loader = None
        if training_data is not None:
            loader = make_loader(
                training_data,
                session.ranks,
                batch_size=sizes.micro_batch_size,
                drop_last=parsed.dataloader_drop_last,
                ranks_per_sample=ranks_per_sample,
                collate_fn=collate_fn,
            )
        engine = TrainingEngine(session, own, sizes, _monitor_options(parsed), schedule, loader)
    begin_run_log(session, make_monitor(session, MonitorOptions()))  # the engine has a monitor of its own
    return engine, own, loader, schedule


def _check_unused(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        unused, instead = _UNUSED_ARGUMENTS[name]
        if value != unused:
            raise ValueError(f"initialize got {name}={value!r}: {instead}; leave it out")


def _with_mesh(config: Config, mesh: Any) -> Config:
    if mesh is None:
        return config
    size, num_ranks = config.sequence_parallel.size, num_ranks_to_come()
    if not (isinstance(mesh, (tuple, list)) and len(mesh) == 2 and all(type(number) is int for number in mesh)):
        raise ValueError(
            f"mesh_param is {mesh!r}; give two numbers: ranks with other data, ranks that share a sequence"
        )
    if config.tensor_parallel.num_ranks > 1:
        raise ValueError(
            f"mesh_param is {tuple(mesh)}, whose two axes leave out that of tensor_parallel; leave it out, and give "
            f'"sequence_parallel": {{"size": {mesh[1]}}} in the configuration'
        )
    if mesh[0] * mesh[1] != num_ranks or size not in (1, mesh[1]):
        raise ValueError(
            f"mesh_param is {tuple(mesh)}, but the run has {num_ranks} ranks and sequence_parallel.size is {size}; "
            "give numbers whose product is the number of ranks, the second as in the configuration"
        )
    section = config.sequence_parallel.model_copy(update={"size": mesh[1]})
    return config.model_copy(update={"sequence_parallel": section})


def _model_func(model: ModelSource | None, model_func: ModelSource | None) -> ModelSource:
    given = model if model is not None else model_func
    if given is None or (model is not None and model_func is not None):
        raise ValueError("initialize needs one model; pass model= (a module, or a function that returns it)")
    return given


def _groups(model_parameters: Any) -> ModelParameters:
    """Converts DeepSpeed's parameters or groups to ``initialize_engine``'s argument."""
    if model_parameters is None or callable(model_parameters):
        return model_parameters
    return model_parameters if _are_patterns(model_parameters) else _returning(model_parameters)


def _are_patterns(items: list[Any]) -> bool:
    """True if groups name their parameters by patterns."""
    params = [item.get("params") for item in items if isinstance(item, Mapping)]
    return bool(params) and all(
        isinstance(group, str) or (isinstance(group, (list, tuple)) and all(isinstance(name, str) for name in group))
        for group in params
    )


def _returning(groups: Iterable[Any]) -> Callable[[nn.Module], Iterable[Any]]:
    return lambda _module: groups


def _their_optimizer(optimizer: Any, model: Any, model_parameters: Any) -> torch.optim.Optimizer | None:
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        theirs = optimizer
    elif callable(optimizer) and (not inspect.isclass(optimizer) or issubclass(optimizer, torch.optim.Optimizer)):
        if model_parameters is None and not isinstance(model, nn.Module):
            raise ValueError("optimizer is to be made of parameters: pass model_parameters, or the model as a module")
        theirs = optimizer(model.parameters() if model_parameters is None else model_parameters)
    else:
        raise ValueError(
            f"optimizer is {optimizer!r}; give a torch.optim.AdamW or Adam, a function that makes one of the "
            "parameters, or none"
        )
    if theirs is not None and model is not None and not isinstance(model, nn.Module):
        raise ValueError(
            "optimizer holds parameters, but the model is a function that has not built them; pass a module"
        )
    return theirs


def _with_optimizer(config: Config, kind: Any, options: Mapping[str, Any]) -> Config:
    """The configuration with a user's optimizer instead of its own."""
    if "optimizer" in config.model_fields_set:
        logger.info("an optimizer was given to initialize: the configuration's is not used")
    params = config.optimizer.params.model_copy(update={"bias_correction": True, **options})
    chosen: OptimizerConfig = config.optimizer.model_copy(update={"type": kind, "params": params})
    return config.model_copy(update={"optimizer": chosen})


def _monitor_options(config: Config) -> MonitorOptions:
    if joins_others():  # rank 0 has the files
        return MonitorOptions()
    return MonitorOptions(
        steps_per_print=config.steps_per_print,
        wall_clock_breakdown=config.wall_clock_breakdown,
        tensorboard=config.tensorboard,
        csv_monitor=config.csv_monitor,
        wandb=config.wandb,
        flops_profiler=config.flops_profiler,
    )

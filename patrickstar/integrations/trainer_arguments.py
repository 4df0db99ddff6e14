"""Translates ``TrainingArguments`` to an engine's configuration, and refuses unsupported ones."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from patrickstar.config import OptimizerType, States, nearest_optimizer, rule_of
from patrickstar.config.spellings import AUTO
from patrickstar.integrations.decided_config import (
    Decision,
    precision_decisions,
    ranks_per_sample,
    with_precision,
    without_decided,
)
from patrickstar.integrations.deepspeed_config import for_trainer
from patrickstar.optimizer.lion import Lion

logger = logging.getLogger("patrickstar")

_OPTIMIZERS = {
    "adamw_torch": (OptimizerType.ADAMW, States.FP32),
    "adamw_torch_fused": (OptimizerType.ADAMW, States.FP32),
    "paged_adamw_32bit": (OptimizerType.ADAMW, States.FP32),
    "adamw_bnb_8bit": (OptimizerType.ADAMW, States.EIGHT_BIT),
    "adamw_8bit": (OptimizerType.ADAMW, States.EIGHT_BIT),
    "adamw_torch_8bit": (OptimizerType.ADAMW, States.EIGHT_BIT),
    "paged_adamw_8bit": (OptimizerType.ADAMW, States.EIGHT_BIT),
    "lion_32bit": (OptimizerType.LION, States.FP32),
    "paged_lion_32bit": (OptimizerType.LION, States.FP32),
    "lion_8bit": (OptimizerType.LION, States.EIGHT_BIT),
    "paged_lion_8bit": (OptimizerType.LION, States.EIGHT_BIT),
    "sgd": (OptimizerType.SGD, States.FP32),
}
"""By the names of ``TrainingArguments.optim``. Paged states are PatrickStar's usual ones."""
_OF_TRANSFORMERS = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Names whose optimizer needs no package beside PyTorch."""
TAKEN_DEEPSPEED = "_patrickstar_deepspeed"
"""Attribute of ``TrainingArguments``: DeepSpeed's configuration, a dict or a path, that ``patrickstar run`` took."""
_REPORTING = ("steps_per_print", "wall_clock_breakdown", "tensorboard", "wandb", "csv_monitor", "flops_profiler")


def precision_of(args: TrainingArguments) -> str:
    """The requested precision by Accelerate's names: ``"bf16"``, ``"fp16"`` or ``"no"``."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "no"


def check_arguments(args: TrainingArguments, model: nn.Module | None) -> None:
    """Refuses arguments that would place, cast or wrap the model.

    Raises:
        ValueError: the message says what to do instead.
    """
    placed = getattr(model, "hf_device_map", None) is not None
    reasons = [
        (
            args.n_gpu > 1,
            "n_gpu is above 1, which wraps the model in nn.DataParallel; start one process per GPU with "
            "torchrun, or show it one GPU (CUDA_VISIBLE_DEVICES)",
        ),
        (
            args.bf16_full_eval or args.fp16_full_eval,
            "bf16_full_eval and fp16_full_eval cast the whole model on the "
            "GPU; leave them out, the engine evaluates in the precision it trains in",
        ),
        (
            (args.deepspeed and not hasattr(args, TAKEN_DEEPSPEED)) or getattr(args, "deepspeed_plugin", None),
            "deepspeed is set, and a model has one engine; give its configuration as patrickstar_config, or start the "
            "script by patrickstar run, which takes it from there",
        ),
        (
            args.fsdp,
            "fsdp is set, and a model has one engine; leave it out, PatrickStar shards over the ranks that "
            "torchrun starts",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size goes on with a smaller batch after running out of memory; "
            "leave it out and set per_device_train_batch_size, the first step's error names the least device_memory",
        ),
        (
            args.save_on_each_node,
            "save_on_each_node is set, but a checkpoint of several ranks is one, on a file system "
            "that all of them see; leave it out",
        ),
        (
            getattr(args, "enable_jit_checkpoint", False),
            "enable_jit_checkpoint saves between backward and step, where an engine has no whole state; leave it out "
            "and put 'resume': 'auto' into patrickstar_config",
        ),
        (
            placed,
            "the model was loaded with device_map, which places its layers; load it without (under TRL "
            "model_init_kwargs={'device_map': None}), PatrickStar moves them as they are needed",
        ),
    ]
    for holds, reason in reasons:
        if holds:
            raise ValueError(reason)


def load_off_devices(given: Iterable[Any]) -> None:
    """Keeps TRL's trainers from loading a model, given by name, whole onto the GPU (``device_map="auto"``): sets
    ``device_map`` None in ``model_init_kwargs`` unless it is set.
    """
    values = list(given)
    if not any(isinstance(value, str) for value in values):
        return
    for args in values:
        if isinstance(args, TrainingArguments) and hasattr(args, "model_init_kwargs"):
            args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}


def optimizer_of(args: TrainingArguments) -> tuple[OptimizerType, States]:
    """The optimizer type for ``args.optim``, and the type of its states.

    Raises:
        ValueError: the optimizer is not supported.
    """
    name = getattr(args.optim, "value", args.optim)
    if name not in _OPTIMIZERS:
        nearest = nearest_optimizer(name)
        instead = next(other for other, kind in _OPTIMIZERS.items() if kind == (nearest.type, nearest.states))
        raise ValueError(
            f"optim is {name!r}; PatrickStar updates as torch's AdamW, Adam and SGD do, and as Lion ({nearest}): set "
            f"optim to {instead!r}, or give optimizer_cls_and_kwargs=(torch.optim.Adam, {{...}})"
        )
    return _OPTIMIZERS[name]


def own_optimizer(args: TrainingArguments) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Class and options where the Trainer would take the class from bitsandbytes or torchao; None elsewhere."""
    kind, _ = optimizer_of(args)
    if getattr(args.optim, "value", args.optim) in _OF_TRANSFORMERS:
        return None
    options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
    if kind is OptimizerType.LION:
        return Lion, options
    return torch.optim.AdamW, {**options, "eps": args.adam_epsilon}


def taken_deepspeed(args: TrainingArguments) -> dict[str, Any]:
    """DeepSpeed's configuration that was taken from ``args``. Its optimizer replaces ``args.optim``, as in DeepSpeed.

    Raises:
        ValueError: it is not valid.
    """
    config = for_trainer(getattr(args, TAKEN_DEEPSPEED, None))
    kind = OptimizerType(config["optimizer"]["type"]) if config.get("optimizer") else optimizer_of(args)[0]
    names = {of_name: name for name, (of_name, states) in reversed(_OPTIMIZERS.items()) if states is States.FP32}
    if kind is not optimizer_of(args)[0] and kind in names:
        args.optim = names[kind]
    return config


def global_batch(config: Mapping[str, Any], args: TrainingArguments) -> Decision:
    """The decision about ``train_batch_size`` from ``args``."""
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return Decision(
        key="train_batch_size",
        value=samples // ranks_per_sample(config),
        source="the product of per_device_train_batch_size, gradient_accumulation_steps and ranks",
    )


def settled_config(config: Mapping[str, Any], args: TrainingArguments, total: Decision) -> dict[str, Any]:
    """``config`` with the precision and clipping of ``args``. DeepSpeed's keys about batches, which ``args`` and
    ``total`` decide, and about reporting, which is the Trainer's, are removed.

    Raises:
        ValueError: ``config`` contradicts them.
    """
    reporting = [key for key in _REPORTING if config.get(key)]
    if reporting:
        logger.info("%s: left to the Trainer (logging_steps, report_to)", ", ".join(reporting))
    config = {key: value for key, value in config.items() if key not in _REPORTING}
    precision = precision_of(args)
    batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    decisions = [
        *precision_decisions(precision, "TrainingArguments' precision"),
        _decision("gradient_clipping", args.max_grad_norm, "max_grad_norm"),
        _decision("train_micro_batch_size_per_gpu", batch, "per_device_train_batch_size"),
        _decision("gradient_accumulation_steps", accumulation, "gradient_accumulation_steps"),
        total,
    ]
    settled = with_precision(without_decided(config, decisions), precision)
    clipping = 0.0 if math.isinf(args.max_grad_norm) else float(args.max_grad_norm)
    return {**settled, "gradient_clipping": clipping, "steps_per_print": 0}


def without_optimizer(config: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any]:
    """``config`` without the keys of the optimizer that the Trainer makes from ``args``, and with its states.

    Raises:
        ValueError: ``config`` contradicts ``args``.
    """
    kind, states = optimizer_of(args)
    of_options = {
        "lr": (args.learning_rate, "learning_rate"),
        "betas": ((args.adam_beta1, args.adam_beta2), "adam_beta1, adam_beta2"),
        "eps": (args.adam_epsilon, "adam_epsilon"),
        "weight_decay": (args.weight_decay, "weight_decay"),
    }
    decisions = [
        Decision(key="optimizer.type", value=kind.value, source="TrainingArguments.optim"),
        *(_decision(f"optimizer.params.{key}", *of_options[key]) for key in rule_of(kind).options if key in of_options),
    ]
    if states is States.FP32:  # the configuration may ask for others
        return without_decided(config, decisions)
    decisions.append(Decision(key="optimizer.states", value=states.value, source="the type of TrainingArguments.optim"))
    settled = without_decided(config, decisions)
    return {**settled, "optimizer": {**settled.get("optimizer", {}), "states": states.value}}


def schedule_params(section: Mapping[str, Any], args: TrainingArguments, num_steps: int) -> dict[str, Any]:
    """The parameters of a configuration's ``scheduler`` for a run of ``num_steps``. ``"auto"`` values come from
    ``args``, or are left to the schedule.
    """
    of_arguments = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": args.learning_rate,
        "warmup_num_steps": args.get_warmup_steps(num_steps),
        "total_num_steps": num_steps,
    }
    given = {key: of_arguments.get(key, AUTO) if value == AUTO else value for key, value in section.items()}
    return {key: value for key, value in given.items() if value != AUTO}


def _decision(key: str, value: Any, argument: str) -> Decision:
    return Decision(key=key, value=value, source=f"TrainingArguments.{argument}")

"""Checks of combinations of values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from patrickstar.choices import Master, MatrixMode, SequenceMode, Speculation
from patrickstar.config.root import Config
from patrickstar.config.shown import shown
from patrickstar.config.update_rules import conflicts_of_params
from patrickstar.config.values import DataType
from patrickstar.sizes import show_exactly

if TYPE_CHECKING:
    from patrickstar import _C

_NAMES = {"torch.float32": DataType.FP32, "torch.float16": DataType.FP16, "torch.bfloat16": DataType.BF16}


def find_conflicts(config: Config) -> list[str]:
    """One line for each impossible combination of values."""
    problems = conflicts_of_params(config.optimizer.type, config.optimizer.params)
    if config.optimizer.speculation is Speculation.COMMIT and (config.fp16 is not None or config.gradient_clipping > 0):
        problems.append(
            'optimizer.speculation is "commit", which updates before the norm of all gradients is known; set '
            'gradient_clipping to 0 and leave fp16 out, or set optimizer.speculation to "auto"'
        )
    if config.optimizer.master is Master.STOCHASTIC and config.bf16 is None:
        problems.append(
            'optimizer.master is "stochastic", which is for bfloat16 parameters; enable bf16, or leave it out'
        )
    elif config.optimizer.master is Master.STOCHASTIC and config.optimizer.speculation is Speculation.ALWAYS:
        problems.append(
            'optimizer.master is "stochastic" and optimizer.speculation is "always": what has no master is updated in '
            'place, and not ahead of the step; set speculation to "auto" or "commit", or leave master out'
        )
    problems += _conflicts_of_disk(config)
    if config.fp16 is not None and config.bf16 is not None:
        problems.append("fp16.enabled and bf16.enabled are both True; enable one")
    elif config.fp16 is not None:
        try:
            make_loss_scaler(config)
        except ValueError as error:  # the scaler checks its own values
            problems.append(str(error))
    problems += _conflicts_of_dtypes(config) + _conflicts_of_sequences(config)
    problems += _conflicts_of_fp8(config)
    return problems + _conflicts_of_matrices(config) + _conflicts_of_experts(config)


def _conflicts_of_fp8(config: Config) -> list[str]:
    if config.fp8 is None:
        return []
    problems = []
    if config.bf16 is None:
        problems.append("fp8 is enabled without bf16, the dtype of what is not multiplied in 8 bits; enable bf16 too")
    if config.tensor_parallel.num_ranks > 1:
        problems.append(
            f"fp8 is enabled, and tensor_parallel divides matrices over {config.tensor_parallel.num_ranks} ranks, "
            "which multiply them in bfloat16; leave one of them out"
        )
    return problems


def _conflicts_of_disk(config: Config) -> list[str]:
    section, zero = config.disk_memory, config.zero_optimization
    offloads = {"offload_optimizer": zero.offload_optimizer, "offload_param": zero.offload_param}
    on_disk = {name: offload for name, offload in offloads.items() if offload.device == "nvme"}
    if on_disk and section.path is None:
        return [
            f'zero_optimization.{next(iter(on_disk))}.device is "nvme", but nvme_path is missing; give a folder on '
            "that disk, or disk_memory.path"
        ]
    if section.size is not None and section.path is None:
        size = show_exactly(section.size)
        return [f"disk_memory.size is {size}, but disk_memory.path is missing; give a folder on that disk"]
    named = [(name, offload.nvme_path) for name, offload in on_disk.items() if offload.nvme_path is not None]
    if named and named[0][1] != section.path:  # the first section's folder is used
        name, path = named[0]
        return [
            f"disk_memory.path is {shown(section.path)} and zero_optimization.{name}.nvme_path is {shown(path)}; "
            "give one of them"
        ]
    return []


def _conflicts_of_sequences(config: Config) -> list[str]:
    sequence, size = config.sequence_parallel, config.sequence_parallel_size
    problems = []
    if size not in (None, sequence.size):
        problems.append(
            f"sequence_parallel.size is {sequence.size} and sequence_parallel_size is {size}; give one of them"
        )
    neighbours = sequence.ulysses_size
    if neighbours is not None and sequence.mode is not SequenceMode.HYBRID:
        problems.append(
            f'sequence_parallel.ulysses_size is {neighbours}, but sequence_parallel.mode is "{sequence.mode.value}"; '
            'leave it out, or set the mode to "hybrid"'
        )
    if neighbours is not None and sequence.size % neighbours:
        problems.append(
            f"sequence_parallel.ulysses_size is {neighbours}, which does not divide sequence_parallel.size, "
            f"{sequence.size}; give a number that does"
        )
    return problems


def _conflicts_of_matrices(config: Config) -> list[str]:
    section, problems = config.tensor_parallel, []
    mesh = f"tensor_parallel is a mesh of {section.rows} x {section.columns}"
    for name, size in (("autotp_size", section.autotp_size), ("tp.tp_size", section.tp.tp_size)):
        if size > 1 and (section.rows, section.columns) != (1, size):
            problems.append(f"{mesh}, and tensor_parallel.{name} is {size}, which is 1 x {size}; give one of them")
    if section.num_ranks == 1:
        return problems
    if section.mode is MatrixMode.ONE and section.rows > 1:
        problems.append(
            f'{mesh}, and tensor_parallel.mode is "1d", which has no rows; give rows 1 and columns {section.num_ranks}'
        )
    if section.mode is MatrixMode.ONE and config.sequence_parallel.size > 1:
        problems.append(
            f'tensor_parallel.mode is "1d", which divides sequences over its columns, and sequence_parallel.size is '
            f'{config.sequence_parallel.size}; set the mode to "2d", or leave sequence_parallel out'
        )
    return problems


def _conflicts_of_experts(config: Config) -> list[str]:
    section, problems = config.expert_parallel, []
    if section.autoep_size > 1 and section.size != section.autoep_size:
        problems.append(
            f"expert_parallel.size is {section.size}, and expert_parallel.autoep_size is {section.autoep_size}; give "
            "one of them"
        )
    if section.size > 1 and config.ranks_per_sample > 1:
        problems.append(
            f"expert_parallel.size is {section.size}, and {config.ranks_per_sample} ranks share each sample "
            "(sequence_parallel, tensor_parallel), which do not go together yet; leave one of them out"
        )
    return problems


def _conflicts_of_dtypes(config: Config) -> list[str]:
    compute = _NAMES[str(config.compute_dtype)]
    problems = []
    wire = config.communication_data_type
    if wire not in (None, DataType.FP32, compute):
        problems.append(
            f'communication_data_type is "{wire.value}", but gradients travel in the compute dtype, which is '
            f'"{compute.value}"; leave it out, or enable {wire.value}'
        )
    param = config.data_types.param_dtype
    if param not in (None, compute):
        problems.append(
            f'data_types.param_dtype is "{param.value}", but the compute dtype is "{compute.value}"; leave it out, and '
            "enable bf16 or fp16 or neither"
        )
    return problems


def check_loss_scaler_state(config: Config, state: Mapping[str, Any]) -> None:
    """Raises ValueError if ``config``'s loss scaler cannot continue from ``state``."""
    scaler = make_loss_scaler(config)
    try:
        if scaler is not None:
            scaler.set_state(**state)
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the loss scaler's state {shown(dict(state))} cannot be set: {reason}") from error


def make_loss_scaler(config: Config) -> _C.optim.LossScaler | None:
    """The loss scaler of ``config.fp16``; None without float16."""
    if config.fp16 is None:
        return None
    from patrickstar import _C  # imported here: reading a configuration needs no extension

    return _C.optim.LossScaler(
        loss_scale=config.fp16.loss_scale,
        initial_scale_power=config.fp16.initial_scale_power,
        scale_window=config.fp16.loss_scale_window,
        hysteresis=config.fp16.hysteresis,
        consecutive_hysteresis=config.fp16.consecutive_hysteresis,
        min_scale=config.fp16.min_loss_scale,
    )

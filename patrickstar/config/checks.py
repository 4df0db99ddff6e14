"""Which values are possible together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from patrickstar.config.root import Config
from patrickstar.config.schema import Speculation
from patrickstar.config.values import DataType

if TYPE_CHECKING:
    from patrickstar import _C

_NAMES = {"torch.float32": DataType.FP32, "torch.float16": DataType.FP16, "torch.bfloat16": DataType.BF16}


def check_adam_options(options: Mapping[str, Any], name: str) -> None:
    """Checks lr, betas, eps and weight_decay of a parameter group (the ranges of ``torch.optim.Adam``).

    Raises:
        ValueError: one is out of its range.
    """
    for key in ("lr", "eps", "weight_decay"):
        if not float(options[key]) >= 0:
            raise ValueError(f"{name}.{key} is {options[key]}; it must be at least 0")
    for index, beta in enumerate(options["betas"]):
        if not 0 <= float(beta) < 1:
            raise ValueError(f"{name}.betas[{index}] is {beta}; it must be at least 0 and less than 1")


def find_conflicts(config: Config) -> list[str]:
    """A line for each combination of values that makes no sense."""
    problems = []
    if config.optimizer.speculation is Speculation.COMMIT and (config.fp16 is not None or config.gradient_clipping > 0):
        problems.append(
            'optimizer.speculation is "commit", which updates before the norm of all gradients is known; set '
            'gradient_clipping to 0 and leave fp16 out, or set optimizer.speculation to "auto"'
        )
    if config.fp16 is not None and config.bf16 is not None:
        problems.append("fp16.enabled and bf16.enabled are both True; enable one")
    elif config.fp16 is not None:
        try:
            make_loss_scaler(config)
        except ValueError as error:  # the scaler checks its own values
            problems.append(str(error))
    return problems + _conflicts_of_dtypes(config)


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


def make_loss_scaler(config: Config) -> _C.optim.LossScaler | None:
    """The loss scaler that ``config.fp16`` asks for; None without float16."""
    if config.fp16 is None:
        return None
    from patrickstar import _C  # here: what reads a configuration needs no extension

    return _C.optim.LossScaler(
        loss_scale=config.fp16.loss_scale,
        initial_scale_power=config.fp16.initial_scale_power,
        scale_window=config.fp16.loss_scale_window,
        hysteresis=config.fp16.hysteresis,
        consecutive_hysteresis=config.fp16.consecutive_hysteresis,
        min_scale=config.fp16.min_loss_scale,
    )

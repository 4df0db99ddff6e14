"""DeepSpeed's ``zero_optimization``. Here every state is sharded over the ranks, and only what does not fit leaves the
GPU, so most of its keys are rows of other_keys.md.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from patrickstar.config.fates import mapped
from patrickstar.config.other_keys import with_other_keys
from patrickstar.config.values import AtLeast0, FilePath, OffloadDevice, Section, Switch


class OffloadOptimizerConfig(with_other_keys("zero_optimization.offload_optimizer"), Section):
    """The section ``zero_optimization.offload_optimizer``: optimizer states in host memory or on disk."""

    device: Annotated[
        OffloadDevice,
        mapped(
            "disk_memory.path",
            '``"nvme"`` is ``nvme_path``, for states that GPU and host have no room for. Otherwise there is no disk: '
            "``device_memory`` and ``host_memory`` say how much may be taken, and what fits stays on the GPU",
        ),
    ] = "none"
    """Where optimizer states are kept: ``"none"`` (the GPU), ``"cpu"`` or ``"nvme"`` (disk)."""
    nvme_path: Annotated[FilePath | None, mapped("disk_memory.path", 'with ``device`` ``"nvme"``')] = None
    """The folder for optimizer states on an NVMe disk."""


class OffloadParamConfig(with_other_keys("zero_optimization.offload_param"), Section):
    """The section ``zero_optimization.offload_param``: parameters in host memory or on disk."""

    device: Annotated[
        OffloadDevice,
        mapped(
            "disk_memory.path",
            '``"nvme"`` is ``nvme_path``, for optimizer states that GPU and host have no room for: parameters, 2 bytes '
            "each in 16 bits, stay in host memory or on the GPU. Otherwise there is no disk: ``device_memory`` and "
            "``host_memory`` say how much may be taken, and what fits stays on the GPU",
        ),
    ] = "none"
    """Where parameters are kept: ``"none"`` (the GPU), ``"cpu"`` or ``"nvme"`` (disk)."""
    nvme_path: Annotated[
        FilePath | None,
        mapped("disk_memory.path", 'with ``device`` ``"nvme"``, where ``offload_optimizer`` names no folder'),
    ] = None
    """The folder for parameters on an NVMe disk."""


class ZeroConfig(with_other_keys("zero_optimization"), Section):
    """The section ``zero_optimization``; a bare ``true`` or ``false`` is stage 1 or 0."""

    @model_validator(mode="before")
    @classmethod
    def _stage_of_a_switch(cls, values: Any) -> Any:
        return {"stage": int(values)} if isinstance(values, bool) else values

    offload_optimizer: OffloadOptimizerConfig = Field(default_factory=OffloadOptimizerConfig)
    """Optimizer states kept in host memory or on disk."""
    offload_param: OffloadParamConfig = Field(default_factory=OffloadParamConfig)
    """Parameters kept in host memory or on disk."""
    sub_group_size: Annotated[
        AtLeast0,
        mapped(
            "default_chunk_size",
            "both are elements that are updated at a time: the smaller counts; less than 1,000,000 counts as left out",
        ),
    ] = 1_000_000_000
    """Number of elements of parameters that are updated at a time."""
    cpu_offload: Annotated[
        Switch | None, mapped("zero_optimization.offload_optimizer.device", '``True`` is ``"cpu"``')
    ] = None
    """An older spelling of ``offload_optimizer`` with ``device`` ``"cpu"``."""
    cpu_offload_param: Annotated[
        Switch | None, mapped("zero_optimization.offload_param.device", '``True`` is ``"cpu"``')
    ] = None
    """An older spelling of ``offload_param`` with ``device`` ``"cpu"``."""

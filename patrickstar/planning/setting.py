"""Budgets and options of an engine that is planned for, and the error of a model that does not fit them."""

from __future__ import annotations

import dataclasses

from patrickstar import _C
from patrickstar.config import ActivationOffload, Master, OptimizerConfig, OptimizerType, Speculation, States


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Budgets and options of an engine, on each rank."""

    device_bytes: int
    """Budget of device memory in bytes, the configuration's ``device_memory``."""
    host_bytes: int
    """Budget of host memory in bytes, the configuration's ``host_memory``."""
    disk_bytes: int = 0
    """Bytes of a disk for optimizer states, the configuration's ``disk_memory.size``; 0: there is none."""
    margin_use_ratio: float = 1.0
    """Share of the device memory left after compute copies and the tide that optimizer states may take
    (``client.mem_tracer.margin_use_ratio``).
    """
    hybrid_adam: bool = True
    """True: optimizer states may live on the device (``optimizer.params.use_hybrid_adam``)."""
    speculation: Speculation = Speculation.AUTO
    """Start of updates on the host, during backward or after it (``optimizer.speculation``)."""
    optimizer: OptimizerType = OptimizerType.ADAMW
    """Update rule (``optimizer.type``)."""
    states: States = States.FP32
    """Storage of momentum and variance (``optimizer.states``)."""
    master: Master = Master.EXACT
    """Master weights, from which parameters are updated (``optimizer.master``)."""
    accumulation: int = 1
    """Forwards and backwards of each step, whose gradients are added up."""
    offload: ActivationOffload = ActivationOffload.AUTO
    """Activation offload between forward and backward (``activations.offload``)."""

    def optimizer_config(self) -> OptimizerConfig:
        """The same as the configuration's section ``optimizer``."""
        return OptimizerConfig(
            type=self.optimizer, speculation=self.speculation, states=self.states, master=self.master
        )

    @property
    def backwards(self) -> _C.Backwards:
        """Backwards of a step, as the engine counts them (``gradient_accumulation_steps``)."""
        return _C.Backwards.SEVERAL if self.accumulation > 1 else _C.Backwards.ONE

    @property
    def update_start(self) -> _C.UpdateStart:
        """When updates on the host may start: after the norm where gradients add up, or parameters have no master, but
        for committed ones.
        """
        if self.accumulation > 1 or self.speculation is Speculation.NEVER:
            return _C.UpdateStart.AFTER_NORM
        if self.speculation is Speculation.COMMIT:
            return _C.UpdateStart.COMMITTED
        return _C.UpdateStart.AFTER_NORM if self.master is Master.STOCHASTIC else _C.UpdateStart.SPECULATIVE

    @property
    def updates_take_memory(self) -> bool:
        """True where updates on the host start during backward, beside the old values."""
        return self.update_start == _C.UpdateStart.SPECULATIVE


class DoesNotFitError(_C.MemoryBudgetError):
    """A model does not fit the budgets; the message says by how much."""

    def __init__(self, message: str, *, least_device_bytes: int | None = None, least_host_bytes: int | None = None):
        super().__init__(message)
        self.least_device_bytes = least_device_bytes
        """The ``device_memory`` that would do, where that is what is short."""
        self.least_host_bytes = least_host_bytes
        """The ``host_memory`` that would do, where that is what is short."""

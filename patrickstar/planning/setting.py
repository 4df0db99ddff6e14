"""Budgets and options of a planned engine, and the error of a model that exceeds them."""

from __future__ import annotations

import dataclasses

import torch

from patrickstar import _C
from patrickstar.config import (
    ActivationOffload,
    Master,
    OptimizerConfig,
    OptimizerType,
    Recompute,
    Speculation,
    States,
)
from patrickstar.machine.engine_options import update_start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Budgets and options of an engine, per rank."""

    device_bytes: int
    """Device memory in bytes (``device_memory``)."""
    host_bytes: int
    """Host memory in bytes (``host_memory``)."""
    disk_bytes: int = 0
    """Bytes of a disk for optimizer states (``disk_memory.size``); 0: none."""
    margin_use_ratio: float = 1.0
    """Share of the device memory beside chunks in use and activations that optimizer states may take
    (``client.mem_tracer.margin_use_ratio``).
    """
    hybrid_adam: bool = True
    """True: optimizer states may rest on the device (``optimizer.params.use_hybrid_adam``)."""
    speculation: Speculation = Speculation.AUTO
    """Start of host updates, during backward or after it (``optimizer.speculation``)."""
    optimizer: OptimizerType = OptimizerType.ADAMW
    """Update rule (``optimizer.type``)."""
    states: States = States.FP32
    """Storage of momentum and variance (``optimizer.states``)."""
    master: Master = Master.EXACT
    """Master weights (``optimizer.master``)."""
    accumulation: int = 1
    """Forward and backward passes per step, with accumulated gradients."""
    offload: ActivationOffload = ActivationOffload.AUTO
    """Activation offload (``activations.offload``)."""
    recompute: Recompute = Recompute.AUTO
    """Recomputation in checkpointed layers (``activations.recompute``)."""

    def optimizer_config(self) -> OptimizerConfig:
        """Returns the configuration's section ``optimizer``."""
        return OptimizerConfig(
            type=self.optimizer, speculation=self.speculation, states=self.states, master=self.master
        )

    @property
    def backwards(self) -> _C.Backwards:
        """Backward passes of a step as the engine counts them (``gradient_accumulation_steps``)."""
        return _C.Backwards.SEVERAL if self.accumulation > 1 else _C.Backwards.ONE

    @property
    def update_start(self) -> _C.UpdateStart:
        """Start of host updates on a GPU."""
        wanted = update_start(self.speculation, torch.device("cuda"))
        return _C.possible_start(wanted, self.backwards, self.master is not Master.STOCHASTIC)

    @property
    def updates_take_memory(self) -> bool:
        """True if host updates start during backward, beside the old values."""
        return self.update_start == _C.UpdateStart.SPECULATIVE

    @property
    def may_put_values_in_place(self) -> bool:
        """True if updates may begin before the norm is known and replace the old values (``choose_layout``)."""
        return self.updates_take_memory and not self.disk_bytes

    @property
    def state_device_bytes(self) -> int:
        """Device bytes of which states may take a part."""
        return self.device_bytes if self.hybrid_adam else 0


class DoesNotFitError(_C.MemoryBudgetError):
    """A model exceeds the budgets; the message says by how much."""

    def __init__(self, message: str, *, least_device_bytes: int | None = None, least_host_bytes: int | None = None):
        super().__init__(message)
        self.least_device_bytes = least_device_bytes
        """The ``device_memory`` that would suffice, if that is what is missing."""
        self.least_host_bytes = least_host_bytes
        """The ``host_memory`` that would suffice, if that is what is missing."""

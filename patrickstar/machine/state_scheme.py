"""Chooses the storage formats of optimizer states from the configuration and the memory budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from patrickstar import _C
from patrickstar.config import Master, OptimizerConfig, Speculation, States, rule_of

# Share of the device budget assumed for states while the activations' need is unknown. Chosen by planned steps of 40
# cases on one H200 (docs/log.md).
_STATES_SHARE = 0.3


@dataclasses.dataclass(frozen=True)
class StateScheme:
    """Storage formats of the optimizer states of trained parameters.

    Args:
        states: of momentum and variance.
        has_variance: the optimizer has one.
        master: of a bfloat16 parameter: float32, its lower half beside the parameter ([Note: split masters]), or none.
        gradient: where the gradient of such a parameter waits for the step.
    """

    states: States = States.FP32
    has_variance: bool = True
    master: _C.StateType = _C.StateType.FLOAT32
    gradient: _C.GradientPlace = _C.GradientPlace.OF_PARAM

    def format_of(self, compute_dtype: torch.dtype, *, keeps_float32: bool) -> _C.StateFormat:
        """Returns the format of one parameter; ``keeps_float32``: its accesses are not stored in 8 bits."""
        types = _C.StateType
        is_16_bit = compute_dtype is torch.bfloat16
        master = self.master if is_16_bit else types.FLOAT32
        gradient = self.gradient if is_16_bit else _C.GradientPlace.OF_PARAM
        momentum, variance = {
            States.FP32: (types.FLOAT32, types.FLOAT32),
            States.BF16: (types.BFLOAT16, types.BFLOAT16),
            States.EIGHT_BIT: (types.FLOAT32, types.FLOAT32) if keeps_float32 else (types.SIGNED8, types.UNSIGNED8),
        }[self.states]
        return _C.StateFormat(master, momentum, variance if self.has_variance else types.NONE, gradient)


def state_scheme(optimizer: OptimizerConfig) -> StateScheme:
    """Returns the scheme of the configuration, ignoring memory.

    With optimizer-in-backward, gradients need not wait and masters are split, which saves 2 bytes per parameter.
    Without masters, a waiting gradient has memory of its own.
    """
    commits = optimizer.speculation is Speculation.COMMIT
    master, gradient = _C.StateType.FLOAT32, _C.GradientPlace.OF_PARAM
    if optimizer.master is Master.STOCHASTIC:
        master = _C.StateType.NONE
        gradient = gradient if commits else _C.GradientPlace.OWN
    elif commits:
        master = _C.StateType.LOWER_HALF
    has_variance = "exp_avg_sq" in rule_of(optimizer.type).states
    return StateScheme(states=optimizer.states, has_variance=has_variance, master=master, gradient=gradient)


def choose_layout(
    make: Callable[[StateScheme], _C.Layout],
    optimizer: OptimizerConfig,
    *,
    updates_begin_early: bool,
    device_bytes: int,
    host_bytes: int,
) -> _C.Layout:
    """Returns the layout with the states of the configuration.

    Masters are split and gradients get memory of their own, at the same number of bytes, under two conditions: updates
    begin in backward, and the host lacks room for new parameters beside the old ones. New parameters can then replace
    the old ones ([Note: values in place]). No value's bits depend on it. Applies to Adam with float32 states and one
    rank.

    Args:
        make: returns the layout of a scheme.
        optimizer: the section of the configuration.
        updates_begin_early: updates begin in backward, before the norm is known, and can be rolled back.
        device_bytes: the device budget, of which states may take a part.
        host_bytes: the host budget.
    """
    scheme = state_scheme(optimizer)
    layout = make(scheme)
    if not updates_begin_early or not may_put_values_in_place(layout, optimizer):
        return layout
    if not lacks_room_ahead(layout, device_bytes=device_bytes, host_bytes=host_bytes):
        return layout
    return make(dataclasses.replace(scheme, master=_C.StateType.LOWER_HALF, gradient=_C.GradientPlace.OWN))


def may_put_values_in_place(layout: _C.Layout, optimizer: OptimizerConfig) -> bool:
    """True if in-place speculative updates support this layout and optimizer."""
    is_adam = "exp_avg_sq" in rule_of(optimizer.type).states
    is_exact = optimizer.states is States.FP32 and optimizer.master is Master.EXACT
    chunks = (layout.chunk(index) for index in range(layout.num_chunks))
    any_in_16_bits = any(chunk["trainable"] and chunk["dtype"] == _C.DType.BFLOAT16 for chunk in chunks)
    return is_adam and is_exact and any_in_16_bits and layout.num_ranks == 1


def lacks_room_ahead(layout: _C.Layout, *, device_bytes: int, host_bytes: int) -> bool:
    """True if the host's part of the chunks leaves no room for new parameters."""
    return room_ahead_bytes(layout, device_bytes) > host_bytes


def room_ahead_bytes(layout: _C.Layout, device_bytes: int) -> int:
    """Host bytes of chunks with new parameters beside old ones, if :data:`_STATES_SHARE` of the device holds states."""
    chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
    resting_tier = sum(chunk["resting_tier_bytes"] for chunk in chunks)
    values = sum(chunk["param_bytes"] for chunk in chunks if chunk["trainable"])
    on_host = max(resting_tier - int(_STATES_SHARE * device_bytes), 0)
    return on_host + values * on_host // max(resting_tier, 1) + _C.reserved_gradient_bytes(layout)

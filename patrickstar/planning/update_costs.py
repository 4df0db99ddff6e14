"""What an update of a parameter costs: the memory that it reads and writes, and the time of a core.

Both follow from which arrays make up a parameter (``_C.StateFormat``, as the layout has it) and from the rule. A host
takes the longer of the two: many cores are held up by memory, two or three by the arithmetic of moments in 8 bits and
of random bits. A GPU takes as long as its memory does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from patrickstar import _C
from patrickstar.config import OptimizerType

_TYPES = _C.StateType
# Of one core of those that update, 1e-9 seconds per parameter, by `benchmark schemes` (AVX-512): an update of float32
# states, and what it takes more without a master, on two cores of a Xeon (benchmark/results/cpu-schemes.json); and for
# each moment in 8 bits, on the 15 hyper-threads beside an H200, of which it takes 2.2, 2.2 and 1.4 in all for Adam, for
# Adam and Lion without masters (h200-fewer-bytes.txt). A Zen 5 codes four times as fast. Fewer bytes of other types
# take no other time, to within 6 %.
_CORE_NANOSECONDS = {
    OptimizerType.ADAM: 0.950,
    OptimizerType.ADAMW: 0.950,
    OptimizerType.LION: 0.705,
    OptimizerType.SGD: 0.687,
}
_NO_MASTER_NANOSECONDS, _EIGHT_BIT_NANOSECONDS = 0.140, 0.55


def state_bytes(kind: _C.StateType) -> float:
    """Of one element of an optimizer state, its part of a block's scale included."""
    return _C.state_bytes(kind, _C.optim.STATE_BLOCK) / _C.optim.STATE_BLOCK


def traffic_bytes(states: _C.StateFormat, compute_bytes: int = 2) -> float:
    """Read and written per parameter: the gradient, the new parameter, each state twice, and the old parameter where it
    is the master or a half of it. ``compute_bytes``: of a gradient or a compute value.
    """
    old = 0 if states.master == _TYPES.FLOAT32 else compute_bytes
    kept = sum(state_bytes(kind) for kind in (states.master, states.momentum, states.variance))
    return 2 * compute_bytes + old + 2 * kept


@dataclasses.dataclass(frozen=True)
class UpdateCost:
    """Of one parameter."""

    traffic_bytes: float
    """Read and written, on whichever side it is updated."""
    core_seconds: float
    """Of one core of the host, where memory does not hold it up."""


def update_cost(states: _C.StateFormat, rule: OptimizerType, compute_bytes: int = 2) -> UpdateCost:
    """By what the states are stored in and the rule."""
    nanoseconds = _CORE_NANOSECONDS[rule]
    nanoseconds += _NO_MASTER_NANOSECONDS * (states.master == _TYPES.NONE)
    nanoseconds += _EIGHT_BIT_NANOSECONDS * sum(
        kind in (_TYPES.SIGNED8, _TYPES.UNSIGNED8) for kind in (states.momentum, states.variance)
    )
    return UpdateCost(traffic_bytes(states, compute_bytes), nanoseconds * 1e-9)


ADAM = update_cost(_C.StateFormat(), OptimizerType.ADAMW)
"""Of Adam on float32 states of a 16-bit parameter, by which machines are measured."""


def costs_of_chunks(chunks: Iterable[Mapping[str, Any]], rule: OptimizerType) -> list[tuple[int, UpdateCost]]:
    """Of each trained chunk (``_C.Layout.chunk``): how many parameters this rank updates, and their cost."""
    return [
        (chunk["shard_numel"], update_cost(chunk["states"], rule, 4 if chunk["dtype"] == _C.DType.FLOAT32 else 2))
        for chunk in chunks
        if chunk["trainable"]
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRates:
    """On average over the parameters that are updated on a side, as an engine measures them too."""

    host_params_per_second: float
    device_params_per_second: float
    host_bytes: float
    """Through host memory per parameter."""

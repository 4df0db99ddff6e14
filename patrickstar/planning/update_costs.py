"""Cost of updating a parameter: memory traffic and core time.

Both follow from the update rule and the parameter's arrays (``_C.StateFormat`` of the layout). A host takes the longer
of the two: memory limits many cores; arithmetic of 8-bit moments and random bits limits two or three. A GPU is limited
by its memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from patrickstar import _C
from patrickstar.config import OptimizerType

_TYPES = _C.StateType
# Nanoseconds of one updating core per parameter, by `benchmark schemes` (AVX-512). Float32 states, and the surcharge
# without a master: two cores of a Xeon (benchmark/results/cpu-schemes.json). Per 8-bit moment: the 15 hyper-threads
# beside an H200 (h200-fewer-bytes.txt; totals 2.2 for Adam, 2.2 for Adam and 1.4 for Lion without masters). A Zen 5
# encodes four times as fast. Other types of fewer bytes differ by at most 6 %.
_CORE_NANOSECONDS = {
    OptimizerType.ADAM: 0.950,
    OptimizerType.ADAMW: 0.950,
    OptimizerType.LION: 0.705,
    OptimizerType.SGD: 0.687,
}
_NO_MASTER_NANOSECONDS, _EIGHT_BIT_NANOSECONDS = 0.140, 0.55


def state_bytes(kind: _C.StateType) -> float:
    """Bytes of one element of an optimizer state, including its share of a block's scale."""
    return _C.state_bytes(kind, _C.optim.STATE_BLOCK) / _C.optim.STATE_BLOCK


def traffic_bytes(states: _C.StateFormat, compute_bytes: int = 2) -> float:
    """Bytes read and written per parameter: the gradient, the new parameter, each state twice, and the old parameter if
    it is (half of) the master. ``compute_bytes``: size of a gradient or parameter element.
    """
    old = 0 if states.master == _TYPES.FLOAT32 else compute_bytes
    kept = sum(state_bytes(kind) for kind in (states.master, states.momentum, states.variance))
    return 2 * compute_bytes + old + 2 * kept


@dataclasses.dataclass(frozen=True)
class UpdateCost:
    """The cost of updating one parameter."""

    traffic_bytes: float
    """Bytes read and written."""
    core_seconds: float
    """Time of one host core without memory limits."""


def update_cost(states: _C.StateFormat, rule: OptimizerType, compute_bytes: int = 2) -> UpdateCost:
    """Returns the cost by storage of the states and update rule."""
    nanoseconds = _CORE_NANOSECONDS[rule]
    nanoseconds += _NO_MASTER_NANOSECONDS * (states.master == _TYPES.NONE)
    nanoseconds += _EIGHT_BIT_NANOSECONDS * sum(
        kind in (_TYPES.SIGNED8, _TYPES.UNSIGNED8) for kind in (states.momentum, states.variance)
    )
    return UpdateCost(traffic_bytes(states, compute_bytes), nanoseconds * 1e-9)


ADAM = update_cost(_C.StateFormat(), OptimizerType.ADAMW)
"""Adam on float32 states of a 16-bit parameter, the reference of machine rates."""


def costs_of_chunks(chunks: Iterable[Mapping[str, Any]], rule: OptimizerType) -> list[tuple[int, UpdateCost]]:
    """Returns, for each trained chunk (``_C.Layout.chunk``), the number of parameters that this rank updates and their
    cost.
    """
    return [
        (chunk["shard_numel"], update_cost(chunk["states"], rule, 4 if chunk["dtype"] == _C.DType.FLOAT32 else 2))
        for chunk in chunks
        if chunk["trainable"]
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRates:
    """Average update rates on each side, as an engine measures them too."""

    host_params_per_second: float
    device_params_per_second: float
    host_bytes: float
    """Host memory bytes per parameter."""

"""The log's line about chunks that made room for activations."""

from __future__ import annotations

import logging

from patrickstar import _C

logger = logging.getLogger("patrickstar")


class PressureLog:
    """Logs after a step how many arrays of chunks left the device since the step before, as memory ran short."""

    def __init__(self, runtime: _C.Runtime):
        self._runtime = runtime
        self._count = 0

    def end_step(self) -> None:
        """The first line is for everybody, those after it for debugging."""
        count = self._runtime.num_pressure_evictions
        if count > self._count:
            logger.log(
                logging.INFO if self._count == 0 else logging.DEBUG,
                "device memory ran short for activations: %d arrays of chunks made room; the next step is planned anew",
                count - self._count,
            )
        self._count = count

"""Profiles one training step: a trace for chrome://tracing and Perfetto, a picture of memory, and a summary.

The core traces the step (csrc/trace/step_tracer.h); this package selects the step and writes the files. Enabled by
``config["profile"]`` or ``patrickstar profile script.py``.

A trace is the dict returned by ``_C.Runtime.take_trace``. Times are seconds since the compute queue began the step's
first forward; the trace ends with the optimizer's step. Work started in the step is shown whole, even if it ends later.
Updates of the previous step that still ran are clipped and marked.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patrickstar.profiling.chrome import chrome_trace
from patrickstar.profiling.layers import ChunkLayers
from patrickstar.profiling.program import PlayedInstruction, compare
from patrickstar.profiling.summary import summarize

if TYPE_CHECKING:
    from patrickstar import _C
    from patrickstar.config import ProfileConfig

logger = logging.getLogger("patrickstar")

__all__ = ["ChunkLayers", "PlayedInstruction", "StepProfiler", "chrome_trace", "summarize", "write_profile"]


def write_profile(
    trace: dict[str, Any],
    step: int,
    folder: Path,
    layers: ChunkLayers,
    program: Sequence[PlayedInstruction] | None = None,
) -> list[Path]:
    """Writes ``step<N>.trace.json`` and ``step<N>.txt``; with a ``program``, ``step<N>.program.txt``; with matplotlib,
    ``step<N>.svg``.

    Returns:
        The files, in this order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trace_file, text_file, program_file, picture = (
        folder / f"step{step}{suffix}" for suffix in (".trace.json", ".txt", ".program.txt", ".svg")
    )
    trace_file.write_text(json.dumps(chrome_trace(trace, step, layers)), encoding="utf-8")
    text_file.write_text(summarize(trace).text(step), encoding="utf-8")
    texts = [trace_file, text_file]
    if program is not None:
        lines = compare(trace, program).lines()
        program_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        texts.append(program_file)
    try:
        from patrickstar.profiling.picture import draw
    except ImportError as error:
        logger.warning("profile: no picture, because %s; in a clone, pip install '.[profile]' brings matplotlib", error)
        return texts
    draw(trace, step, picture, layers)
    return [*texts, picture]


def make_profiler(
    runtime: _C.Runtime,
    config: ProfileConfig | None,
    layers: ChunkLayers,
    program_of: Callable[[], Sequence[PlayedInstruction] | None],
    rank: int,
    num_ranks: int,
) -> StepProfiler | None:
    """Returns the profiler of ``config``, or None. With several ranks, each writes to its own subfolder."""
    if config is not None and num_ranks > 1:
        config = config.model_copy(update={"output": str(Path(config.output) / f"rank-{rank}")})
    return None if config is None else StepProfiler(runtime, config, layers, program_of)


class StepProfiler:
    """Traces one step of an engine and writes the files. The session calls its methods within the step.

    Args:
        runtime: the engine's.
        config: number of the step, and the folder.
        layers: layers of the chunks.
        program_of: returns the program of the next step; None if no step was measured.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(
        self,
        runtime: _C.Runtime,
        config: ProfileConfig,
        layers: ChunkLayers,
        program_of: Callable[[], Sequence[PlayedInstruction] | None],
    ):
        self._program_of = program_of
        self._program: Sequence[PlayedInstruction] | None = None
        self._runtime = runtime
        self._config = config
        self._layers = layers
        self._folder = Path(config.output)
        self._folder.mkdir(parents=True, exist_ok=True)  # fails now instead of after the step
        self._num_steps = 0
        self._written = False
        if config.step == 1:
            runtime.start_trace()

    def begin_backward(self) -> None:
        """Called before each backward. Tracing starts in the previous step: its updates may run into the traced one."""
        if self._num_steps == self._config.step - 2:
            self._runtime.start_trace()

    def end_step(self) -> None:
        """Called after each optimizer step; writes the files of the traced step."""
        self._num_steps += 1
        trace = None if self._written else self._runtime.take_trace()
        if self._num_steps == self._config.step - 1:
            self._program = self._program_of()
        if trace is None:
            return
        self._written = True
        files = write_profile(trace, self._num_steps, self._folder, self._layers, self._program)
        logger.info("profile of step %d: %s", self._num_steps, ", ".join(map(str, files)))

    def close(self) -> None:
        """Called when the engine closes; warns if no files were written."""
        if not self._written:
            logger.warning(
                "profile: the engine was closed after %d steps, before step %d was over; nothing was written",
                self._num_steps,
                self._config.step,
            )

"""Forwards of an engine's module. If device memory runs out, a forward is run again with chunks evicted.

    forwards.run(call, signals, _C.Tracking.TRAINING)

The module's own calls, outermost and nested, come through :meth:`Forwards.call`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from patrickstar import _C
from patrickstar.activations.offloaders import ActivationOffloader
from patrickstar.module.observer import Observer
from patrickstar.parallel.calls import Calls
from patrickstar.session.error_texts import first_sentence
from patrickstar.session.forward_attempt import ForwardAttempt, RepeatableForwards
from patrickstar.session.interrupts import deferred_signals
from patrickstar.session.kept_plan import Inputs
from patrickstar.session.one_thread import OneThread

logger = logging.getLogger("patrickstar")

Run = Callable[..., Any]
"""A call of the user's module, as ``torch.nn.Module.__call__`` makes it."""

_IN_FORWARD = (_C.StepState.FORWARD, _C.StepState.EVALUATION)
_SHARED_FORWARD = (
    "The forward was not run again with an emptier device, as one of a rank's own is: the ranks that share it wait for "
    "each other in the middle of it. More ranks that share matrices (tensor_parallel) or sequences (sequence_parallel) "
    "have less each."
)


class Forwards:
    """See the module's docstring.

    Args:
        runtime: the core.
        observer: sees the module's uses of parameters.
        thread: that is in a call of the engine.
        repeatable: undoes the changes of a forward.
        calls: how ranks share calls of the module.
        activations: keeps those of training forwards.
        give_up: called when a training forward ran out of memory.
        explain: adds remedies, and a sentence about this forward, to an out-of-memory error.
        inputs: moves inputs of a call to the module's device.
    """

    def __init__(
        self,
        runtime: _C.Runtime,
        observer: Observer,
        thread: OneThread,
        repeatable: RepeatableForwards,
        calls: Calls,
        activations: ActivationOffloader,
        give_up: Callable[[], None],
        explain: Callable[[torch.OutOfMemoryError, str], None],
        inputs: InputsInPlace,
    ):
        self._runtime = runtime
        self._observer = observer
        self._thread = thread
        self._repeatable = repeatable
        self._calls = calls
        self._activations = activations
        self._give_up = give_up
        self._explain = explain
        self._inputs = inputs

    @property
    def is_running(self) -> bool:
        """True if a forward or a backward of the engine runs."""
        return self._runtime.step_state in (*_IN_FORWARD, _C.StepState.BACKWARD)

    def call(
        self,
        run: Run,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: Callable[[Callable[[], Any], Inputs], Any],
    ) -> Any:
        """Makes the call ``run`` of a module that holds all parameters; an outermost one goes through ``forward``.

        Inputs are moved within the forward. If they find no room, the forward is run again with chunks evicted.
        """
        state = self._runtime.step_state
        if state in _IN_FORWARD:
            self._thread.check_inside()
            with self._calls.call(args, kwargs) as call:
                return call.result(run(*call.args, **call.kwargs))

        def move_and_run() -> Any:
            with self._calls.call(args, kwargs) as call:
                moved = self._inputs.move((call.args, call.kwargs))
                return call.result(run(*moved[0], **moved[1]))

        if state == _C.StepState.BACKWARD:  # a recomputation, or a hook's forward (losses.py)
            self._thread.check_inside()
            return move_and_run()
        return forward(move_and_run, (args, kwargs))

    def run(self, call: Callable[[], Any], signals: deferred_signals, tracking: _C.Tracking) -> Any:
        """Runs ``call``, one forward; again with chunks evicted if memory ran out. Signals are allowed within it.

        Raises:
            torch.OutOfMemoryError: no attempt had room, or the forward cannot be run again; the message says which.
        """
        attempt = self._repeatable.begin()
        result = self._repeat(call, signals, tracking, attempt)
        self._repeatable.end(attempt)
        return result

    def _repeat(
        self, call: Callable[[], Any], signals: deferred_signals, tracking: _C.Tracking, start: ForwardAttempt
    ) -> Any:
        attempt = _C.Attempt.FIRST
        try:
            if not self._calls.repeats_forwards:
                return self._run_once(call, signals, tracking, _C.Attempt.ONLY)
            for what in (_C.EvictionScope.VALUES, _C.EvictionScope.EVERYTHING):
                try:
                    return self._run_once(call, signals, tracking, attempt)
                except torch.OutOfMemoryError as error:
                    if obstacle := start.obstacle():
                        self._explain(error, obstacle)
                        raise
                    # The error is not kept: its traceback would keep the activations alive.
                    logger.warning(
                        "%s; the forward is run again with what can leave the device pushed off", first_sentence(error)
                    )
                start.rewind()
                self._activations.forget()
                if tracking == _C.Tracking.TRAINING:
                    self._give_up()
                self._runtime.undo_forward()
                start.undo_writes()
                self._runtime.evict_all_from_device(what)
                attempt = _C.Attempt.AGAIN
            return self._run_once(call, signals, tracking, _C.Attempt.LAST)
        except BaseException:
            self._runtime.abort_forward()
            self._repeatable.abandon()
            raise

    def _run_once(
        self, call: Callable[[], Any], signals: deferred_signals, tracking: _C.Tracking, attempt: _C.Attempt
    ) -> Any:
        training = tracking == _C.Tracking.TRAINING
        self._runtime.begin_forward(tracking, attempt)
        try:
            with signals.allowed(), self._activations.keeping() if training else contextlib.nullcontext():
                result = call()
            self._runtime.end_forward()
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError) and attempt in (_C.Attempt.LAST, _C.Attempt.ONLY):
                self._explain(error, _SHARED_FORWARD if attempt == _C.Attempt.ONLY else "")
            self._observer.uses.forget_scopes()
            raise
        return result


@dataclasses.dataclass(frozen=True)
class InputsInPlace:
    """Moves inputs of the module to its device and dtype."""

    device: torch.device
    dtype: torch.dtype
    """Dtype for floating point inputs; float32 leaves them unchanged."""

    def move(self, inputs: Inputs) -> Inputs:
        """The inputs with the tensors in tuples, lists and dicts on the device."""
        return tree_map_only(torch.Tensor, self._move, inputs, is_leaf=_is_no_plain_container)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        cast = tensor.is_floating_point() and tensor.dtype != self.dtype and self.dtype != torch.float32
        return tensor.to(self.device, self.dtype if cast else tensor.dtype, non_blocking=True)


def _is_no_plain_container(value: Any) -> bool:
    """True for other containers (caches, model outputs), which pass as the same objects."""
    return not isinstance(value, (tuple, list, dict))

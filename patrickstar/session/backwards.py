"""One engine's part in a backward.

    backwards.begin(scale, expected_options)
    loss.backward()
    backwards.end()           # or, if the backward failed: backwards.abort()

Several engines may take part in one backward (``joint_backward.py``).
"""

from __future__ import annotations

from patrickstar import _C
from patrickstar.activations.offloaders import ActivationOffloader
from patrickstar.module.managed import ManagedParams
from patrickstar.module.observer import Observer
from patrickstar.optimizer.core_options import CoreOptions
from patrickstar.profiling import StepProfiler
from patrickstar.session.gradient_reads import GradientReads
from patrickstar.session.step_gradients import StepGradients
from patrickstar.session.trained_params import TrainedParams


class Backwards:
    """See the module's docstring.

    Args:
        runtime: the core.
        observer: sees uses of parameters, also within a backward.
        managed: parameters that PyTorch keeps, with their gradients.
        trained: owns the hooks that move gradients into chunks.
        gradients: of the running step.
        reads: copies of gradients that the user may read after a step.
        activations: kept for the backward.
        profiler: notified of each backward; None: no profile.
    """

    def __init__(
        self,
        runtime: _C.Runtime,
        observer: Observer,
        managed: ManagedParams,
        trained: TrainedParams,
        gradients: StepGradients,
        reads: GradientReads,
        activations: ActivationOffloader,
        profiler: StepProfiler | None,
    ):
        self._runtime = runtime
        self._observer = observer
        self._managed = managed
        self._trained = trained
        self._gradients = gradients
        self._reads = reads
        self._activations = activations
        self._profiler = profiler

    def begin(self, scale: float, expected_options: list[CoreOptions]) -> None:
        """Prepares for autograd's gradients, until :meth:`end` or :meth:`abort`. If it raises, nothing has begun.

        Args:
            scale: the loss scale of this backward.
            expected_options: the optimizer's options, for updates that begin in backward; empty: unknown.
        """
        if self._profiler is not None:
            self._profiler.begin_backward()
        self._gradients.forget()
        self._reads.forget()
        self._trained.drop_left_gradients()
        self._managed.keep_gradients()
        if self._gradients.are_committed:
            self._observer.overwritten.forget()
        try:
            self._runtime.begin_backward(expected_options, self._gradients.chunk_factor / scale)
        except BaseException:
            self._managed.restore_gradients()
            raise

    def end(self) -> None:
        """Called when autograd has finished."""
        self._runtime.end_backward()
        self._activations.end_backward()

    def gave_gradients(self) -> bool:
        """True if the finished backward gave any gradient. If False, the core has forgotten this backward."""
        return self._managed.has_gradients or self._runtime.keep_joint_backward()

    def abort(self) -> int:
        """Undoes a failed backward. Returns the number of chunks whose update cannot be undone."""
        self._observer.uses.forget_scopes()
        try:
            return self._runtime.abort_backward()
        finally:
            self._activations.finish()
            self._trained.drop_left_gradients()
            self._managed.restore_gradients()

    def forget(self) -> None:
        """Drops Python's gradients since the last step. The core drops those in chunks."""
        self._gradients.end_step()
        self._reads.forget()
        self._managed.zero_grad()

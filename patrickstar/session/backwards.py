"""One engine's part in a backward: what begins with it, what its end or its failure leaves.

    backwards.begin(scale, expected_options)
    loss.backward()
    backwards.end()
    backwards.keep(scale)     # or, where the backward failed: backwards.abort()

Several engines may take part in one ([Note: joint backward]).
"""

from __future__ import annotations

from patrickstar import _C
from patrickstar.activations.keepers import ActivationKeeper
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
        observer: hears of uses of parameters, also within a backward.
        managed: parameters that PyTorch keeps, with their gradients.
        trained: has the hooks that take gradients into chunks.
        gradients: those of the step.
        reads: what is left of the gradients of the step before.
        activations: what backwards use up.
        profiler: is told of each backward; None: nobody traces.
    """

    def __init__(
        self,
        runtime: _C.Runtime,
        observer: Observer,
        managed: ManagedParams,
        trained: TrainedParams,
        gradients: StepGradients,
        reads: GradientReads,
        activations: ActivationKeeper,
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
        """Autograd's gradients are taken from now on, until :meth:`end` or :meth:`abort`. Where it raises, nothing has
        begun.
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
        """Autograd is done."""
        self._runtime.end_backward()
        self._activations.end_backward()

    def gave_gradients(self) -> bool:
        """After :meth:`end`. False: no parameter has a gradient, and the core has forgotten this backward."""
        return self._managed.has_gradients or self._runtime.keep_joint_backward()

    def abort(self) -> int:
        """Undoes a backward that failed. Chunks that were updated for good stay so; their number is returned."""
        self._observer.uses.forget_scopes()
        try:
            return self._runtime.abort_backward()
        finally:
            self._activations.finish()
            self._trained.drop_left_gradients()
            self._managed.restore_gradients()

    def forget(self) -> None:
        """Gradients since the last step are dropped, but for those that chunks have: the core drops these."""
        self._gradients.end_step()
        self._reads.forget()
        self._managed.zero_grad()

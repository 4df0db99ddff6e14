"""The gradients of one step as a whole: their mean or sum over ranks, their norm, and the factor that clipping makes
of it.

A host (a Trainer, Lightning) may ask for the norm and clip between the last backward and the step, or not ask at all:
the norm is made once, when it is first needed, and once more if gradients change after that.

[Note: sums over ranks] Chunks hold the ranks' mean, which the core makes. With ``gradient_allreduce_op`` "sum" it is
multiplied by the number of ranks in float32, wherever it is read: in the norm, the update, by ``safe_get_full_grad``.
No gradient in 16 bits is larger for it than with "mean", so none overflows sooner. Where the number of ranks is a power
of two the factor takes no rounding; else it takes one in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from patrickstar import _C
from patrickstar.config import Config, RankReduction, Speculation
from patrickstar.module.managed import ManagedParams
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.session.rank_sync import combine_over_ranks

_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class StepGradients:
    """Of one engine. With several ranks all must ask, in the same order; ``ranks`` are those that share its chunks."""

    def __init__(
        self,
        runtime: _C.Runtime,
        managed: ManagedParams,
        ranks: ChunkRanks,
        config: Config,
        left_out: Sequence[int],
        total: Callable[[float], float],
        loss_scale: Callable[[], float],
    ):
        """``left_out``: parameters in chunks that other ranks count in the norm; ``total``: sums squares over ranks
        that have other blocks (:class:`~patrickstar.parallel.divided_matrices.Matrices`); ``loss_scale``: the next
        backward's.
        """
        self._runtime = runtime
        self._managed = managed
        self._ranks = ranks
        self._configured_max_norm = config.gradient_clipping
        self._max_norm: float | None = None
        self.are_committed = config.optimizer.speculation is Speculation.COMMIT
        """Updates are made for good in backward, which uses gradients up."""
        self._left_out = list(left_out)
        self._total = total
        num_ranks = ranks.size
        by_mean = config.sequence_parallel.size  # [Note: gradients of a divided sequence]
        self.chunk_factor = num_ranks if config.gradient_allreduce_op is RankReduction.SUM else by_mean
        """What gradients in chunks are multiplied by ([Note: sums over ranks])."""
        self._loss_scale = loss_scale
        self._scale: float | None = None  # of the gradients that wait for the step; None: there are none
        self._norm: float | None = None
        self._is_combined = False

    @property
    def scale(self) -> float:
        """The loss scale of the gradients since the last step: that of the engine whose backward made them."""
        return self._loss_scale() if self._scale is None else self._scale

    def keep(self, scale: float) -> None:
        """A backward has left gradients for the step, which were scaled by ``scale``."""
        self._scale = scale

    def check_scale(self, scale: float) -> None:
        """Raises StateError when the gradients that wait were scaled by another loss scale."""
        if self._scale not in (None, scale):
            raise _C.StateError(
                f"gradients were scaled by {self._scale:g} so far and would be by {scale:g} in this backward (float16: "
                "each engine has a loss scale of its own); step or zero_grad between them, or train in bf16"
            )

    def norm(self) -> float:
        """Global L2 norm of all gradients without the loss scale, before clipping; NaN when one is not finite."""
        if self._norm is None:
            if not self._is_combined:
                divisor = self._ranks.size / self.chunk_factor
                combine_over_ranks(self._ranks, self._managed.shared, divisor)
                self._is_combined = True
            managed_squares = self._managed.sum_of_squares()
            own = self._runtime.prepare_step(self._left_out) * self.chunk_factor**2 + managed_squares
            squares = self._total(own)
            self._norm = math.sqrt(squares) / self.scale if math.isfinite(squares) else math.nan
        return self._norm

    def clip(self, max_norm: float) -> None:
        """The step that comes clips to ``max_norm`` instead of the configuration's ``gradient_clipping``; 0 or less: it
        does not clip.

        Raises:
            StateError: updates are committed in backward, before the norm is known.
        """
        if max_norm > 0 and self.are_committed:
            raise _C.StateError(
                f'gradients were to be clipped to {max_norm}, but optimizer.speculation is "commit", which updates in '
                'backward, before their norm is known; set optimizer.speculation to "auto", or do not clip'
            )
        self._max_norm = max_norm

    def clip_ratio(self) -> float:
        """The largest norm allowed over the norm, infinite where nothing is clipped: what gradients are multiplied by
        where it is below 1, as ``torch.nn.utils.clip_grad_norm_`` does.
        """
        max_norm = self._configured_max_norm if self._max_norm is None else self._max_norm
        return max_norm / (self.norm() + _CLIP_EPS) if max_norm > 0 else math.inf

    def note_change(self) -> None:
        """A chunk's gradient was rewritten: the norm is another one."""
        self._norm = None

    def forget(self) -> None:
        """A backward begins or the step is over: what was said of its gradients is past."""
        self._norm = None
        self._is_combined = False

    def end_step(self) -> None:
        """After the step, or when its gradients are dropped."""
        self.forget()
        self._scale = None
        self._max_norm = None

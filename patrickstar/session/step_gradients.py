"""The gradients of one step: mean or sum over ranks, norm, and clipping.

A host (a Trainer, Lightning) may read the norm and clip between the last backward and the step. The norm is computed
once, when first needed, and again if gradients change afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from patrickstar import _C
from patrickstar.config import Config, RankReduction, Speculation
from patrickstar.elastic.gradient_noise import GradientParts
from patrickstar.module.managed import ManagedParams
from patrickstar.ranks.chunk_ranks import ChunkRanks
from patrickstar.session.rank_sync import combine_over_ranks

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ uses the same


class StepGradients:
    """Gradients of one engine's step. With several ranks all must call its methods, in the same order."""

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
        """``ranks``: share this rank's chunks. ``left_out``: parameters in chunks that other ranks count in the norm.
        ``total``: sums squares over ranks with other blocks (``Matrices.total``). ``loss_scale``: returns the next
        backward's.
        """
        self._runtime = runtime
        self._managed = managed
        self._ranks = ranks
        self._configured_max_norm = config.gradient_clipping
        self._max_norm: float | None = None
        self.are_committed = config.optimizer.speculation is Speculation.COMMIT
        """Optimizer-in-backward: updates cannot be undone, and backward consumes gradients."""
        self._left_out = list(left_out)
        self._total = total
        num_ranks = ranks.size
        by_mean = config.sequence_parallel.size  # see ShardedSequences
        self.chunk_factor = num_ranks if config.gradient_allreduce_op is RankReduction.SUM else by_mean
        """Factor of gradients in chunks, which hold the ranks' mean.

        With ``gradient_allreduce_op`` "sum" it is the number of ranks, else the ranks of a sequence. It is applied in
        float32 wherever gradients are read: norm, update, ``safe_get_full_grad``. So no 16-bit gradient is larger than
        with "mean", and none overflows sooner. A power of two causes no rounding.
        """
        self._loss_scale = loss_scale
        self._scale: float | None = None  # pending gradients' loss scale; None: there are none
        self._norm: float | None = None
        self._is_combined = False
        self._num_backwards = 0
        self.parts: GradientParts | None = None
        """For the gradient noise scale, once the norm is known; None: not measured, or not finite."""

    @property
    def scale(self) -> float:
        """Loss scale of the gradients since the last step, as the engine whose backward made them had it."""
        return self._loss_scale() if self._scale is None else self._scale

    def keep(self, scale: float) -> None:
        """Records gradients of a backward, scaled by ``scale``."""
        self._scale = scale
        self._num_backwards += 1

    def check_scale(self, scale: float) -> None:
        """Raises StateError if pending gradients have another loss scale."""
        if self._scale not in (None, scale):
            raise _C.StateError(
                f"gradients were scaled by {self._scale:g} so far and would be by {scale:g} in this backward (float16: "
                "each engine has a loss scale of its own); step or zero_grad between them, or train in bf16"
            )

    def norm(self) -> float:
        """Global L2 norm of all gradients without the loss scale, before clipping; NaN if one is not finite."""
        if self._norm is None:
            if not self._is_combined:
                divisor = self._ranks.size / self.chunk_factor
                combine_over_ranks(self._ranks, self._managed.shared, divisor)
                self._is_combined = True
            managed_squares = self._managed.sum_of_squares()
            in_chunks = self._runtime.sum_of_squares(self._left_out) * self.chunk_factor**2
            self.parts = self._find_parts(in_chunks)
            squares = self._total(in_chunks + managed_squares)
            self._norm = math.sqrt(squares) / self.scale if math.isfinite(squares) else math.nan
        return self._norm

    def _find_parts(self, step_squares: float) -> GradientParts | None:
        """Parameters that stay with PyTorch are in neither norm. A micro-batch's loss is divided by their number."""
        summed = self._runtime.squares_of_parts(self._left_out)
        factor = (self.chunk_factor * self._num_backwards) ** 2 / self._ranks.size
        squares = [summed * factor / self.scale**2, step_squares / self.scale**2]
        if not all(map(math.isfinite, squares)):
            return None
        return GradientParts(self._num_backwards * self._ranks.size, *squares)

    def clip(self, max_norm: float) -> None:
        """Sets the norm limit of the next step in place of the configuration's ``gradient_clipping``; 0 or less: no
        clipping.

        Raises:
            StateError: optimizer-in-backward updates before the norm is known.
        """
        if max_norm > 0 and self.are_committed:
            raise _C.StateError(
                f'gradients were to be clipped to {max_norm}, but optimizer.speculation is "commit", which updates in '
                'backward, before their norm is known; set optimizer.speculation to "auto", or do not clip'
            )
        self._max_norm = max_norm

    def clip_ratio(self) -> float:
        """Allowed norm over the norm, infinite without clipping. Below 1 it is the gradients' factor, as in
        ``torch.nn.utils.clip_grad_norm_``.
        """
        max_norm = self._configured_max_norm if self._max_norm is None else self._max_norm
        return max_norm / (self.norm() + _CLIP_EPS) if max_norm > 0 else math.inf

    def asked_factor(self) -> float:
        """Factor of the gradients after :meth:`clip`, as ``clip_grad_norm_`` leaves them; 1 before it, since the
        configuration's clipping is the step's.
        """
        return 1.0 if self._max_norm is None else min(1.0, self.clip_ratio())

    def note_change(self) -> None:
        """Drops the norm after a chunk's gradient was rewritten."""
        self._norm = None

    def forget(self) -> None:
        """Drops the norm as a backward begins or a step ends."""
        self._norm = None
        self._is_combined = False

    def end_step(self) -> None:
        """Called after the step, or when its gradients are dropped."""
        self.forget()
        self._scale = None
        self._max_norm = None
        self._num_backwards = 0

"""The engine that ``patrickstar.initialize`` returns, with the methods of DeepSpeed's."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from patrickstar import _C
from patrickstar.config import BatchSizes
from patrickstar.deepspeed.accumulation import Accumulation, CallersAccumulation
from patrickstar.deepspeed.config_answers import ConfigAnswers
from patrickstar.deepspeed.counts import Counts
from patrickstar.deepspeed.param_attributes import put_attributes, take_attributes
from patrickstar.deepspeed.saving import SavingEngine
from patrickstar.elastic.phases import Membership, Recovered, Resized
from patrickstar.elastic.sampler import ForActivations
from patrickstar.engine.optim import HybridOptimizer
from patrickstar.module.compiled.dynamo import outside_of_graphs
from patrickstar.monitor import MonitorOptions, Phase
from patrickstar.resize.plan import UserState
from patrickstar.session.interrupts import deferred_signals
from patrickstar.session.lending import lend, take_back
from patrickstar.session.session import Session


class TrainingEngine(ConfigAnswers, SavingEngine):
    """Trains a module step by step, with micro-batches, a schedule and logs:

        for batch in loader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

    ``step`` is called for every micro-batch and updates at the accumulation boundary. Methods have the names and
    meaning of DeepSpeed's engine; other attributes are looked up on the module.
    """

    optimizer: HybridOptimizer
    """The optimizer; :meth:`step` calls its ``step``."""
    training_dataloader: DataLoader[Any] | None
    """The loader of this rank's micro-batches from ``training_data``; None without such data."""

    def __init__(
        self,
        session: Session,
        optimizer: HybridOptimizer,
        batch_sizes: BatchSizes,
        monitor_options: MonitorOptions,
        lr_scheduler: Any = None,
        training_dataloader: DataLoader[Any] | None = None,
    ):
        super().__init__(session)
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        self.global_steps = self.global_samples = self.skipped_steps = 0
        self._micro_batch_size = batch_sizes.micro_batch_size
        counts = Accumulation if session.config.managed_gradient_accumulation else CallersAccumulation
        self._accumulation = counts(batch_sizes.accumulation_steps)
        self._monitor = self.make_monitor(monitor_options)
        self._inputs: Any = None
        self._is_syncing = True
        self._step_applied = False
        if self.zero_optimization_partition_weights():
            put_attributes(session)

    # A step.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; see :meth:`patrickstar.engine.engine.Engine.forward`."""
        if not (self.training and torch.is_grad_enabled() and self._monitor.is_active):
            return super().forward(*args, **kwargs)
        with deferred_signals():
            self._inputs = (args, kwargs)
            with self._monitor.phase(Phase.FORWARD):
                return super().forward(*args, **kwargs)

    @outside_of_graphs
    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """Runs backward for one micro-batch.

        Args:
            loss: a tensor of one element.
            retain_graph: as in ``Tensor.backward``.
            scale_wrt_gas: divide the loss by the micro-batches of a step, so that gradients are their mean.
            **kwargs: passed to ``Tensor.backward``.

        Returns:
            the divided loss.

        Raises:
            ValueError, StateError, MemoryBudgetError: as :meth:`patrickstar.engine.engine.Engine.backward`.
        """
        steps = self._accumulation.num_micro_batches
        scaled = loss / steps if scale_wrt_gas and steps > 1 else loss
        with deferred_signals():
            with self._monitor.phase(Phase.BACKWARD):
                super().backward(scaled, retain_graph=retain_graph, **kwargs)
            self._monitor.add_micro_batch(self._inputs, loss.detach() if scale_wrt_gas else loss.detach() * steps)
            self._inputs = None
            self._accumulation.note_backward()
        return scaled

    @outside_of_graphs
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Ends a micro-batch. At the accumulation boundary also clips and updates, and steps the schedule if the update
        was applied.

        Args:
            lr_kwargs: passed to the schedule's ``step``.

        Raises:
            StateError: there was no backward, or it is called within :meth:`no_sync`.
        """
        if not self._is_syncing:
            raise _C.StateError("step() within no_sync(): leave the with statement before the step")
        self._accumulation.check_backward()
        with deferred_signals():  # the update, its counts and the schedule change together
            self._step_applied = False
            if self._accumulation.step_updates:
                self._update(lr_kwargs or {})
            self._accumulation.end_micro_batch()

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        lr = self.get_lr()[0]
        with self._monitor.phase(Phase.STEP):
            self.optimizer.step()
        self._step_applied = self._session.outcome.applied
        self.global_steps += 1
        self.global_samples += self._micro_batch_size * self._accumulation.num_in_step * self.world_size
        if not self._step_applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self._monitor.end_step(lr)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for accumulation; :meth:`step` is refused inside. It may be nested.

        Gradients are reduce-scattered in any case, so a rank keeps no more of them than its shard.
        """
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def coalesce_grad_reduction(self) -> contextlib.AbstractContextManager[None]:
        """:meth:`no_sync`, for several backward passes of one step."""
        return self.no_sync()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Refused: it is for ``loss.backward()``.

        Raises:
            StateError: always.
        """
        raise _C.StateError("scale(loss) is for loss.backward(), which cannot be called; call engine.backward(loss)")

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the :meth:`step` of the present micro-batch updates."""
        return self._accumulation.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether the next :meth:`step` updates; the engine no longer counts."""
        self._accumulation.set_boundary(is_boundary)

    def was_step_applied(self) -> bool:
        """True if the last :meth:`step` updated parameters."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Global L2 norm of the last step's gradients before clipping; NaN if it was skipped, None before the first
        step.
        """
        return self._session.outcome.grad_norm if self._session.num_steps > 0 else None

    @outside_of_graphs
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Deletes all gradients since the last update; the step restarts."""
        with deferred_signals():
            super().zero_grad(set_to_none)
            self._accumulation.forget_step()

    # Options and counts.

    def get_lr(self) -> list[float]:
        """The present learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[tuple[float, float] | float]:
        """``betas`` of each parameter group, or SGD's ``momentum``; DeepSpeed calls both momentum."""
        return [group["betas"] if "betas" in group else group["momentum"] for group in self.optimizer.param_groups]

    @property
    def micro_steps(self) -> int:
        """Micro-batches since the start of training, including those before a loaded checkpoint."""
        return self._accumulation.num_done

    @property
    def global_rank(self) -> int:
        """The rank of this process among all processes of the run, from 0."""
        return self._session.ranks.context.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine."""
        return self._session.ranks.context.local_rank

    @property
    def dp_world_size(self) -> int:
        """Equal to :attr:`world_size`."""
        return self.world_size

    @property
    def world_size(self) -> int:
        """Number of ranks that train together."""
        return len(self._session.ranks.members)

    def train_batch_size(self) -> int:
        """Samples of a step on all ranks."""
        return self._micro_batch_size * self._accumulation.num_micro_batches * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in one rank's micro-batch."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of each rank in one optimizer step."""
        return self._accumulation.num_micro_batches

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the micro-batches of a step. Call it between two steps.

        Raises:
            ValueError: it is no multiple of micro-batch x ranks.
            StateError: a step has begun.
        """
        if not self._accumulation.is_between_steps:
            raise _C.StateError("set_train_batch_size within a step; call it after the step's last micro-batch")
        samples = self._micro_batch_size * self.world_size
        if train_batch_size <= 0 or train_batch_size % samples != 0:
            raise ValueError(
                f"train_batch_size is {train_batch_size}; give a multiple of micro-batch x ranks, {samples}"
            )
        self._accumulation.num_micro_batches = train_batch_size // samples

    def empty_partition_cache(self) -> None:
        """Returns PyTorch's unused cached memory to the device. Chunks' memory is unchanged, within
        ``device_memory``.
        """
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def offload_states(
        self, include: Any = None, device: str = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Moves chunks to the host and lends the device's memory until :meth:`reload_states`; see :meth:`lend`.

        Args:
            include: kinds of states in DeepSpeed; all leave here.
            device: ``"cpu"``.
            pin_memory, non_blocking: no effect: host memory is pinned, and the call returns when all have left.

        Raises:
            ValueError: the device is not the CPU.
        """
        name = getattr(device, "value", device)
        if name != "cpu":
            raise ValueError(f'offload_states: device is {name!r}; give "cpu"')
        lend(self._session, 0)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Ends the loan of :meth:`offload_states`. ``non_blocking``: no effect, since copies overlap with compute."""
        take_back(self._session)

    # Other ranks.

    def resize(self, num_ranks: int, *, user_state: Mapping[str, UserState] | None = None, **options: Any) -> Resized:
        """:meth:`patrickstar.engine.engine.Engine.resize`. ``train_batch_size`` and the micro-batch are constant, and
        ``gradient_accumulation_steps`` follows. The schedule and the engine's counts are user state of the resize.

        Raises:
            StateError: also within a step, and if the engine was given ``training_data``.
        """
        self._check_resizable("resize")
        with deferred_signals():  # the engine and its counts change together
            resized = super().resize(num_ranks, user_state=self._user_state(user_state), **options)
            if resized.membership is Membership.RANK:
                self._follow_ranks()
        return resized

    def join(self, *, user_state: Mapping[str, UserState] | None = None, **options: Any) -> Resized:
        """:meth:`patrickstar.engine.engine.Engine.join`, with the conditions of :meth:`resize`. A joining process
        writes no metrics; with ``PATRICKSTAR_ELASTIC_JOINS`` 1 it opens no file for them.
        """
        self._check_resizable("join")
        with deferred_signals():
            resized = super().join(user_state=self._user_state(user_state), **options)
            self._monitor.close()  # rank 0 writes the metrics
            self._follow_ranks()
        return resized

    def keep_copies(self, name: str, *, redundancy: int = 1, user_state: Mapping[str, UserState] | None = None) -> None:
        """:meth:`patrickstar.engine.engine.Engine.keep_copies`, with the schedule and the engine's counts."""
        self._check_resizable("keep_copies")
        super().keep_copies(name, redundancy=redundancy, user_state=self._user_state(user_state))

    def recover(
        self, error: BaseException, *, user_state: Mapping[str, UserState] | None = None, **options: Any
    ) -> Recovered:
        """:meth:`patrickstar.engine.engine.Engine.recover`. The step starts over with its first micro-batch."""
        self._accumulation.forget_step()
        with deferred_signals():
            recovered = super().recover(error, user_state=self._user_state(user_state), **options)
            if recovered.resized.membership is Membership.RANK:
                self._follow_ranks()
        return recovered

    def _check_resizable(self, call: str) -> None:
        if not self._accumulation.is_between_steps:
            raise _C.StateError(f"{call} within a step; call it after the step's last micro-batch")
        if self.training_dataloader is not None:
            raise _C.StateError(
                f"{call} of an engine that was given training_data, whose loader gives batches for the ranks that it "
                "was made for; leave training_data out, and take batches from patrickstar.elastic.ElasticLoader"
            )

    def _user_state(self, user_state: Mapping[str, UserState] | None) -> dict[str, UserState]:
        if any(isinstance(item, ForActivations) and item.measured_micro_batch for item in (user_state or {}).values()):
            raise ValueError(
                "MicroBatches.BY_ACTIVATIONS with an engine that counts micro-batches of "
                "train_micro_batch_size_per_gpu; give the sampler MicroBatches.AT_MOST, or use initialize_engine"
            )
        counts = Counts(self, self.train_batch_size(), self._micro_batch_size)
        own: dict[str, UserState] = {counts.name: counts}
        if self._saved_scheduler() is not None:
            own["patrickstar.initialize's lr_scheduler"] = self.lr_scheduler
        return {**(user_state or {}), **own}

    def _follow_ranks(self) -> None:
        self._monitor.change_ranks(self.world_size)
        if self.zero_optimization_partition_weights():
            put_attributes(self._session)

    def close(self) -> None:
        """Flushes logs, then :meth:`patrickstar.engine.engine.Engine.close`."""
        self._monitor.close()
        take_attributes(self._session)
        super().close()

    def discard(self) -> None:
        """Frees all chunks; parameters then have no elements (:meth:`patrickstar.engine.engine.Engine.discard`)."""
        take_attributes(self._session)
        super().discard()

    def destroy(self) -> None:
        """:meth:`close`, by DeepSpeed's name."""
        self.close()

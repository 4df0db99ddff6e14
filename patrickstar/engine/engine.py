"""``Engine``: an ``nn.Module`` around the user's module, with the calls of a training run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from patrickstar import _C
from patrickstar.elastic.gradient_noise import GradientParts
from patrickstar.elastic.phases import Recovered, Resized, ResizePhase
from patrickstar.elastic.published import DEFAULT_FOLDER
from patrickstar.elastic.rendezvous import Rendezvous
from patrickstar.elastic.survivors import RollCall
from patrickstar.engine.run_log import make_monitor, make_stall_sampler
from patrickstar.engine.saving_face import SavingFace
from patrickstar.monitor import MonitorOptions, StallSampler, StepMonitor
from patrickstar.planning.step_plan import Plan
from patrickstar.resize.copies import Copies
from patrickstar.resize.joining import join_session
from patrickstar.resize.plan import ResizeOptions, UserState
from patrickstar.resize.recovery import recover_session
from patrickstar.resize.resizing import check_supported, resize_session
from patrickstar.sequence.group import HybridGroup, SequenceGroup
from patrickstar.session.closing import abandon_session, close_session, discard_session
from patrickstar.session.interrupts import deferred_signals
from patrickstar.session.lending import lend, take_back
from patrickstar.session.session import LostRanks
from patrickstar.state.save_load import check_between_steps

_T = TypeVar("_T")


class Engine(SavingFace):
    """Trains the user's module, which stays available as ``module``.

    The module is converted in place: same class, same ``Parameter`` objects, true shapes. Its parameters have the
    compute dtype; :meth:`state_dict` returns float32 masters. ``close`` (or leaving a ``with`` block) restores an
    ordinary module.
    """

    _copies: Copies | None = None

    @property
    def rank_timeout_seconds(self) -> float:
        """The configuration's ``rank_timeout_seconds``."""
        return self._session.config.rank_timeout_seconds

    @property
    def num_parameters(self) -> int:
        """Parameters of the module, on all ranks together."""
        return self._session.num_parameters

    @property
    def ranks_per_sample(self) -> int:
        """Neighbouring ranks that get the same samples, since they share sequences or matrices
        (``sequence_parallel``, ``tensor_parallel``).
        """
        return self._session.config.ranks_per_sample

    def run_forward(self, call: Callable[[], _T]) -> _T:
        """Runs ``call`` as one forward of the module and returns its result. For steps of several module calls, such as
        a LightningModule's ``training_step``.

        If device memory runs out, ``call`` runs again with chunks evicted. Module calls within it belong to this
        forward; their inputs are not moved.
        """
        return self._loop.forward(call)

    @property
    def sequence_group(self) -> SequenceGroup | HybridGroup | None:
        """With ``sequence_parallel``: the ranks that share sequences with this one, for
        :func:`patrickstar.sequence.attention` in modules that are not Hugging Face's. None: each rank has its own
        sequences.
        """
        return self._session.calls.sequence_group

    def gather_tokens(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """With ``sequence_parallel``: all-gathers an output of the last call along its tokens, in order, on every rank.

        Without it, returns ``tensor``. Collective over the ranks that share the sequence. The gradient reaches each
        rank's own tokens.

        Args:
            tensor: with this rank's tokens along ``dim``, such as ``logits`` [batch, tokens, vocabulary].
            dim: of the tokens.

        Raises:
            ValueError: the tensor has a different number of tokens.
            StateError: the model was not called yet.
        """
        return self._session.calls.gather_tokens(tensor, dim)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of ``loss``, scaled with float16. Calls before ``optimizer.step()`` accumulate gradients in float32.

        Args:
            loss: a tensor of one element, from this engine's forward.
            **kwargs: passed to ``Tensor.backward``, for example ``retain_graph=True``.

        Raises:
            ValueError: the loss is not a tensor of one element.
            StateError: no forward came before, or the loss does not require grad.
            MemoryBudgetError: the device budget is too small for the first step; the message names the least one that
                works.
        """
        self._loop.backward(loss, **kwargs)

    def grad_norm(self) -> float:
        """Global L2 norm, over all ranks, of the gradients since the last step, before clipping; NaN if one is not
        finite.

        Collective over all ranks. The step reuses the result.

        Raises:
            StateError: no gradients.
        """
        return self._session.grad_norm()

    def measure_gradient_parts(self) -> None:
        """Measures :attr:`gradient_parts` from the next step on, until a resize. Collective over all ranks.

        Ranks add up the squares of their first micro-batch's gradients. One rank does so after the first of several
        backwards.

        Raises:
            StateError: ranks share samples or experts (``tensor_parallel``, ``sequence_parallel``,
                ``expert_parallel``).
        """
        self._session.measure_gradient_parts()

    @property
    def gradient_parts(self) -> GradientParts | None:
        """Squared norms of the last step's gradient, for :class:`patrickstar.elastic.GradientNoise`. None: not
        measured, not finite, or a step with one micro-batch on one rank.
        """
        return self._session.outcome.parts

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Like ``torch.nn.utils.clip_grad_norm_`` of all parameters, between the last backward and
        ``optimizer.step()``.

        The next step clips to ``max_norm`` in place of the configuration's ``gradient_clipping``; 0: no clipping.
        Returns :meth:`grad_norm` on the CPU.

        Raises:
            StateError: no gradients, or optimizer-in-backward updates before the norm is known.
        """
        norm = self._session.grad_norm()
        self._session.gradients.clip(max_norm)
        with _C.HostAllocations():
            return torch.tensor(norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients since the last step."""
        self._loop.zero_grad()

    def accept_mixed_state(self) -> None:
        """Continues with the present parameters and optimizer states although they come from different steps or
        checkpoints.

        Such a state is left by a failed backward with optimizer-in-backward, an ``optimizer.step()`` that failed within
        an update, or a failed ``load_checkpoint``. Training and saving are refused until this call or until a
        checkpoint is loaded. Gradients are dropped. Collective over all ranks.
        """
        self._loop.accept_mixed_state()

    def report(self) -> dict[str, Any]:
        """All figures of this engine in one flat dict: the source for tests, logs and benchmarks.

        Bytes moved, evictions and fetches are totals since :meth:`reset_report`; peaks are the highest since then.
        """
        return self._session.report()

    def reset_report(self) -> None:
        """Resets counters to zero and peaks to present values."""
        self._session.runtime.reset_report()

    def plan(self) -> Plan:
        """The plan that the next step replays, for printing, saving, or :func:`patrickstar.plan.predict`. The
        configuration's ``plan`` starts a new engine with a saved one.

        Raises:
            StateError: no step was made yet.
        """
        return self._session.plan()

    def make_monitor(self, options: MonitorOptions) -> StepMonitor:
        """A monitor that logs every few steps and writes to TensorBoard, W&B or a CSV file (docs/logging.md); on every
        rank.

        Raises:
            ImportError: the package of a requested sink is missing.
            ValueError: an existing metrics file does not fit.
        """
        return make_monitor(self._session, options)

    def make_stall_sampler(self) -> StallSampler:
        """A sampler that traces some steps and measures the share of each in which the device waited, by cause."""
        return make_stall_sampler(self._session)

    @contextlib.contextmanager
    def lend(self, keep: int | str = 0) -> Iterator[None]:
        """Context in which others use the device's memory, such as a generator in this process or another.

        Chunks are on the host meanwhile, PyTorch's cache is returned, and ``device_memory`` limits nothing. Saving and
        exports are allowed; forwards, backwards and steps are not. No number changes. Collective over all ranks. The
        first loan prepares host memory for what leaves, which takes longer than later ones.

        Args:
            keep: bytes of chunks that may stay, or a size such as ``"4GiB"``; parameters leave before states.

        Raises:
            MemoryBudgetError: ``host_memory`` has no room for the chunks; or, at the end, others still hold memory.
                Training can go on.
            StateError: the memory is lent, or a forward, a backward or a step is not over.
            ValueError: ``keep`` is no size.
        """
        lend(self._session, keep)
        try:
            yield
        except BaseException:
            with contextlib.suppress(_C.MemoryBudgetError):  # the first error is the cause
                take_back(self._session)
            raise
        take_back(self._session)

    def resize(
        self,
        num_ranks: int,
        *,
        leaving: Sequence[int] | None = None,
        user_state: Mapping[str, UserState] | None = None,
        rendezvous: Rendezvous | str | None = None,
        folder: str = DEFAULT_FOLDER,
        timeout_seconds: float | None = None,
        note_phase: Callable[[ResizePhase], None] = lambda phase: None,
    ) -> Resized:
        """Continues with another number of ranks, between two steps and without a checkpoint (docs/guides/elastic.md).

        All ranks call it with the same arguments. As many further processes as the new number needs call :meth:`join`.
        Parameters, moments, step counts, loss scale and this process's random numbers keep their bits.

        Args:
            num_ranks: the new number.
            leaving: ranks that end, without rank 0; None: as few as possible, chosen by the least useful shards.
            user_state: user state by name that joining processes take over: learning-rate schedulers, an
                ``ElasticSampler``. The same names on all processes.
            rendezvous: where processes meet: "host:port", or None for the environment's ``PATRICKSTAR_ELASTIC``. Unused
                if no process joins.
            folder: in memory, for shards on their way. Processes without access to another's folder fetch over the
                network.
            timeout_seconds: for joining processes to arrive and to answer, below ``rank_timeout_seconds``; None: half
                of that, at most a minute.
            note_phase: called with each phase as it begins.

        Raises:
            ResizeError: the ranks are unchanged, and training can go on.
            RankFailure: a rank failed during the change; continue from a checkpoint.
            StateError: gradients are pending, or the engine cannot be resized.
            ValueError: ranks cannot be assigned this way, or the timeout is too long.
        """
        default = min(self.rank_timeout_seconds / 2, 60.0)
        options = ResizeOptions.of(default, rendezvous, user_state, folder, timeout_seconds, note_phase)
        with deferred_signals() as signals, signals.allowed():
            return resize_session(self._session, num_ranks, leaving, options)

    def join(
        self,
        *,
        user_state: Mapping[str, UserState] | None = None,
        rendezvous: Rendezvous | str | None = None,
        folder: str = DEFAULT_FOLDER,
        timeout_seconds: float | None = None,
        note_phase: Callable[[ResizePhase], None] = lambda phase: None,
    ) -> Resized:
        """Makes this process one of the ranks that call :meth:`resize`, with their values, step, learning rates and
        loss scale, and rank 0's random numbers. The engine was made on one rank, of the same model with the same
        configuration.

        Args:
            user_state: user state by name, which is overwritten.
            rendezvous: as given to :meth:`resize`.
            folder: as given to :meth:`resize`.
            timeout_seconds: for each wait: for the invitation, and for data of other processes. At most
                ``rank_timeout_seconds``; None: that.
            note_phase: called with each phase as it begins.

        Raises:
            ResizeError: this process did not join; its engine is unchanged.
            RankFailure: a rank failed during the change.
            SecretError: the file of the run's secret is missing or refused.
            ValueError: the timeout exceeds ``rank_timeout_seconds``.
        """
        default = self.rank_timeout_seconds
        options = ResizeOptions.of(default, rendezvous, user_state, folder, timeout_seconds, note_phase)
        with deferred_signals() as signals, signals.allowed():
            return join_session(self._session, options)

    def keep_copies(self, name: str, *, redundancy: int = 1, user_state: Mapping[str, UserState] | None = None) -> None:
        """Prepares :meth:`recover`: copies this rank's shards into host memory, and to the next rank's. Collective,
        between two steps; :class:`patrickstar.elastic.ElasticRun` calls it after each step.

        Args:
            name: of this process, unique in the run and the same in each call.
            redundancy: 1, or 0: no shards are copied, and recovered ranks need a checkpoint.
            user_state: as given to :meth:`resize`.

        Raises:
            RankFailure: a rank is lost. Earlier copies are still there.
            StateError: gradients are pending, or the engine cannot be resized.
        """
        session = self._session
        check_supported(session, "keep_copies")
        check_between_steps(session, "keep_copies")
        with deferred_signals():
            if self._copies is None:
                self._copies, session.lost_ranks = Copies(name), LostRanks.GO_ON
            self._copies.enter(session)
            if redundancy > 0:
                self._copies.take(session, user_state or {})

    def recover(
        self,
        error: BaseException,
        *,
        call: RollCall,
        number: int,
        user_state: Mapping[str, UserState] | None = None,
        rendezvous: Rendezvous | str | None = None,
        folder: str = DEFAULT_FOLDER,
        timeout_seconds: float | None = None,
        note_phase: Callable[[ResizePhase], None] = lambda phase: None,
    ) -> Recovered:
        """Goes on with the ranks that are left, at the last step of which all shards were copied. All of them call it
        after a RankFailure, in any state. Arguments are those of :meth:`resize`, and:

        Args:
            error: the RankFailure.
            call: a roll call with the name that :meth:`keep_copies` was given.
            number: of this recovery, the same on all ranks, from 1.

        Raises:
            RankFailure: another rank was lost, or the others go on without this one.
            StateError: :meth:`keep_copies` was never called.
        """
        if self._copies is None:
            raise _C.StateError("recover without keep_copies, which says who the ranks are; call that after each step")
        default = min(self.rank_timeout_seconds / 2, 60.0)
        options = ResizeOptions.of(default, rendezvous, user_state, folder, timeout_seconds, note_phase)
        with deferred_signals():
            return recover_session(self._session, self._copies, call, number, options, error)

    def close(self) -> None:
        """Turns the module back into an ordinary one and frees all chunks. May be called twice.

        Each of several ranks gets the whole module; :meth:`discard` ends a run without that. With ``tensor_parallel``
        the module keeps this rank's blocks, and its calls raise from then on.

        Raises:
            MemoryBudgetError: host memory does not hold the module's own parameters; nothing is changed, and the engine
                stays open.
        """
        close_session(self._session)

    def discard(self) -> None:
        """Frees all chunks; the module's parameters have no elements afterwards. May be called twice.

        For the end of a run whose model does not fit into host memory once per rank. Save or export it before.
        """
        discard_session(self._session)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or len(self._session.ranks.members) == 1:
            self.close()
        else:  # the other ranks' shards are out of reach
            abandon_session(self._session, error)

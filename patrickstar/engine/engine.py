"""The engine: a thin ``nn.Module`` around the user's module."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from patrickstar import _C
from patrickstar.checkpoint.export import DEFAULT_MAX_FILE_BYTES
from patrickstar.elastic.phases import Phase, Resized
from patrickstar.elastic.published import DEFAULT_FOLDER
from patrickstar.elastic.rendezvous import Rendezvous
from patrickstar.engine.module_face import ModuleFace
from patrickstar.engine.run_log import make_monitor, make_stall_sampler
from patrickstar.monitor import MonitorOptions, StallSampler, StepMonitor
from patrickstar.planning.step_plan import Plan
from patrickstar.resize.joining import join_session
from patrickstar.resize.plan import Carried, ResizeOptions
from patrickstar.resize.resizing import resize_session
from patrickstar.sequence.group import HybridGroup, SequenceGroup
from patrickstar.session.closing import abandon_session, close_session, discard_session
from patrickstar.session.interrupts import deferred_signals
from patrickstar.state.export_weights import export_session
from patrickstar.state.save_load import Scheduler, load_session, save_session

_T = TypeVar("_T")


class Engine(ModuleFace):
    """Trains the user's module, which stays available as ``module``.

    The module is converted in place: same class, same ``Parameter`` objects, true shapes. Its parameters have the
    compute dtype; float32 values are what :meth:`state_dict` gives. ``close`` (or leaving a ``with`` block) turns it
    into an ordinary module again.
    """

    @property
    def rank_timeout_seconds(self) -> float:
        """The configuration's ``rank_timeout_seconds``."""
        return self._session.config.rank_timeout_seconds

    def run_forward(self, call: Callable[[], _T]) -> _T:
        """Runs ``call`` as one forward of the module and returns what it returns: for a step that is more than one call
        of the module, such as a LightningModule's ``training_step``.

        It may run twice: once more with an emptier device where memory ran out. Calls of the module within it are part
        of this forward; inputs are taken as they are.
        """
        return self._loop.forward(call)

    @property
    def sequence_group(self) -> SequenceGroup | HybridGroup | None:
        """With ``sequence_parallel``: the ranks that share sequences with this one, for
        :func:`patrickstar.sequence.attention` in modules that are not Hugging Face's; None: each rank has its own.
        """
        return self._session.calls.sequence_group

    def gather_tokens(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """With ``sequence_parallel``: an output of the last call, of all tokens in their order, on every rank; without
        it ``tensor`` itself. All ranks that share the sequence call it. Its gradient reaches each rank's own tokens.

        Args:
            tensor: with this rank's tokens along ``dim``, such as ``logits`` [batch, tokens, vocabulary].
            dim: of the tokens.

        Raises:
            ValueError: the tensor has another number of tokens.
            StateError: the model was not called yet.
        """
        return self._session.calls.gather_tokens(tensor, dim)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of ``loss`` (scaled if loss scaling is on). Several calls before ``optimizer.step()`` accumulate
        gradients, in float32.

        Args:
            loss: a tensor of one element, from this engine's forward.
            **kwargs: passed to ``Tensor.backward``, for example ``retain_graph=True``.

        Raises:
            ValueError: the loss is not a tensor of one element.
            StateError: no forward came before, or the loss does not require grad.
            MemoryBudgetError: in the first step, the device budget is too small; the message gives the least that
                works.
        """
        self._loop.backward(loss, **kwargs)

    def grad_norm(self) -> float:
        """Global L2 norm, over all ranks, of the gradients since the last step, before clipping; NaN when one is not
        finite. Every rank calls it; the step uses it again, so it costs nothing twice.

        Raises:
            StateError: there are no gradients.
        """
        return self._session.grad_norm()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` of all parameters, between the last backward and ``optimizer.step()``:
        that step clips to ``max_norm`` instead of the configuration's ``gradient_clipping`` (0: it does not clip).
        Returns :meth:`grad_norm`, on the CPU.

        Raises:
            StateError: there are no gradients, or updates are committed in backward, before the norm is known.
        """
        norm = self._session.grad_norm()
        self._session.gradients.clip(max_norm)
        with _C.HostAllocations():
            return torch.tensor(norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients since the last step."""
        self._loop.zero_grad()

    def accept_mixed_state(self) -> None:
        """Goes on with parameters and optimizer states as they are where they are not all of one step or checkpoint: a
        backward that had updated a part for good has failed, ``optimizer.step()`` in the middle of an update, or
        ``load_checkpoint``. Until then, or until a checkpoint is loaded, all that would train or save is refused.
        Gradients are dropped. With several ranks all must call it.
        """
        self._loop.accept_mixed_state()

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        lr_scheduler: Scheduler | None = None,
    ) -> Path:
        """Saves the run between two steps (docs/checkpoints.md): parameters, Adam states, step counts, buffers, the
        groups' options, loss scaler, random number generators. Returns the checkpoint's folder, ``directory/tag``.

        Args:
            directory: made if there is none. A file ``latest`` in it will name the checkpoint.
            tag: ``global_step<n>`` for None. A checkpoint of the same tag stays until the new one is complete.
            client_state: anything of the user's that is made of numbers, strings, bools, None, lists, tuples, dicts.
            lr_scheduler: its state is kept too.

        Raises:
            CheckpointError: it was not saved; what was saved before is as it was.
            StateError: there are gradients that no step has used.
        """
        self._session.check_open()
        with deferred_signals() as signals, self._session.guard("save_checkpoint"), signals.allowed():
            return save_session(self._session, directory, tag, client_state, lr_scheduler)

    def load_checkpoint(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        *,
        lr_scheduler: Scheduler | None = None,
    ) -> tuple[Path, dict[str, Any]]:
        """Goes on from a checkpoint of the same model, whatever the budgets were; returns its folder and the
        ``client_state``. Random number generators are restored when as many ranks load as saved.

        Args:
            directory: as given to :meth:`save_checkpoint`.
            tag: the latest for None (``patrickstar.checkpoint.latest_tag`` says whether there is one).
            lr_scheduler: gets the state of the one that was saved.

        Raises:
            CheckpointError: there is none, or it is of another model (then nothing is changed), or it is damaged.
            StateError: there are gradients that no step has used.
        """
        self._session.train_unfrozen()
        with deferred_signals() as signals, self._session.guard("load_checkpoint"), signals.allowed():
            return load_session(self._session, directory, tag, lr_scheduler)

    def export_weights(
        self,
        directory: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = torch.float32,
        max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    ) -> Path:
        """Writes parameters and persistent buffers as Hugging Face's sharded safetensors, with the names of the
        module's ``state_dict`` and tied weights once; with ``config.json`` for a Hugging Face model, whose
        ``from_pretrained`` then reads the folder. No copy of the model is made: one parameter at a time.

        Args:
            directory: the folder to make.
            dtype: of floating point parameters; None: that in which each is held (float32 for trained ones).
            max_file_bytes: bytes per file.

        Raises:
            CheckpointError: the folder exists and is not empty, or cannot be written.
        """
        self._session.check_open()
        with deferred_signals() as signals, self._session.guard("export_weights"), signals.allowed():
            self._session.ranks.meet()
            return export_session(self._session, directory, dtype, max_file_bytes)

    def report(self) -> dict[str, Any]:
        """All figures of this engine in one flat dict: the only source for tests, logs and benchmarks.

        Bytes moved, evictions and fetches are totals, peaks are the highest, since :meth:`reset_report`.
        """
        return self._session.report()

    def reset_report(self) -> None:
        """Sets counters to zero and peaks to the present."""
        self._session.runtime.reset_report()

    def plan(self) -> Plan:
        """The plan that the next step replays: print it, save it, give it to :func:`patrickstar.plan.predict`. The
        configuration's ``plan`` makes a new engine start with a saved one.

        Raises:
            StateError: no step was made yet.
        """
        return self._session.plan()

    def make_monitor(self, options: MonitorOptions) -> StepMonitor:
        """What logs a line now and then and feeds TensorBoard, W&B or a CSV file (docs/logging.md); on every rank.

        Raises:
            ImportError: a package for what is asked is missing.
            ValueError: a file of metrics that is there does not fit.
        """
        return make_monitor(self._session, options)

    def make_stall_sampler(self) -> StallSampler:
        """What traces a step now and then, and says for how much of it the device waited, and for what."""
        return make_stall_sampler(self._session)

    def resize(
        self,
        num_ranks: int,
        *,
        leaving: Sequence[int] | None = None,
        carried: Mapping[str, Carried] | None = None,
        rendezvous: Rendezvous | str | None = None,
        folder: str = DEFAULT_FOLDER,
        timeout_seconds: float | None = None,
        note_phase: Callable[[Phase], None] = lambda phase: None,
    ) -> Resized:
        """Goes on with another number of ranks, between two steps and without a checkpoint
        (docs/guides/elastic.md). All ranks call it alike; as many processes as are wanted beyond them call
        :meth:`join`. Parameters, moments, step counts, loss scale and this process's random numbers keep their bits.

        Args:
            num_ranks: from now on.
            leaving: the ranks that end, rank 0 not among them; None: as few as possible, those whose shards are of
                least use.
            carried: by name, what has a state that a process that joins takes over: schedules of learning rates, an
                ``ElasticSampler``. The same names on all processes.
            rendezvous: where processes meet; "host:port", or None for the environment's ``PATRICKSTAR_ELASTIC``. Not
                used where nobody joins.
            folder: through which shards travel: of memory. Processes that do not reach each other's fetch them.
            timeout_seconds: for processes that join to come, and to answer, less than ``rank_timeout_seconds``; None:
                half of that, and a minute at most.
            note_phase: is told each phase as it begins.

        Raises:
            ResizeError: the ranks are as they were, and training can go on with them.
            RankFailure: a rank has failed in the middle: go on from a checkpoint.
            StateError: there are gradients that no step has used, or the engine cannot be resized.
            ValueError: ranks cannot be assigned so, or the timeout is too long.
        """
        default = min(self.rank_timeout_seconds / 2, 60.0)
        options = ResizeOptions.of(default, rendezvous, carried, folder, timeout_seconds, note_phase)
        with deferred_signals() as signals, signals.allowed():
            return resize_session(self._session, num_ranks, leaving, options)

    def join(
        self,
        *,
        carried: Mapping[str, Carried] | None = None,
        rendezvous: Rendezvous | str | None = None,
        folder: str = DEFAULT_FOLDER,
        timeout_seconds: float | None = None,
        note_phase: Callable[[Phase], None] = lambda phase: None,
    ) -> Resized:
        """Makes this process one of the ranks that call :meth:`resize`: with their values, step, learning rates, loss
        scale, and rank 0's random numbers. The engine was made alone, of the same model with the same configuration.

        Args:
            carried: by name, what takes over the state of theirs.
            rendezvous: as given to :meth:`resize`.
            folder: as given to :meth:`resize`.
            timeout_seconds: for each wait: to be invited, and for what others send. At most ``rank_timeout_seconds``;
                None: that.
            note_phase: is told each phase as it begins.

        Raises:
            ResizeError: this process did not join; its engine is as it was.
            RankFailure: a rank has failed in the middle.
            SecretError: the file of the run's secret is missing or refused.
            ValueError: the timeout is longer than ``rank_timeout_seconds``.
        """
        default = self.rank_timeout_seconds
        options = ResizeOptions.of(default, rendezvous, carried, folder, timeout_seconds, note_phase)
        with deferred_signals() as signals, signals.allowed():
            return join_session(self._session, options)

    def close(self) -> None:
        """Turns the module back into an ordinary one and frees all chunks. May be called twice.

        The module is whole again on each rank of several; :meth:`discard` ends a run without that. With
        ``tensor_parallel`` it keeps this rank's blocks ([Note: what a division undoes]).

        Raises:
            MemoryBudgetError: host memory does not hold the module's own parameters ([Note: room to close]); nothing is
                changed, and the engine stays open.
        """
        close_session(self._session)

    def discard(self) -> None:
        """Frees all chunks; the module's parameters have no elements afterwards. For the end of a run whose model would
        not fit into host memory once per rank: what is wanted of it was saved or exported before. May be called twice.
        """
        discard_session(self._session)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or len(self._session.ranks.members) == 1:
            self.close()
        else:  # what the other ranks hold of the module cannot be had any more
            abandon_session(self._session, error)

"""Elastic run: one line in a training script lets its ranks change on orders of the process that started it.

    run = ElasticRun(engine, {"sampler": sampler, "schedule": schedule}, checkpoint=folder, redundancy=1)
    for micro_batches in ElasticLoader(data, sampler):
        with run.step():
            ...                                 # a step
            run.step_done(loss)
        if run.next is not Next.TRAIN:
            break
    run.end()

Orders come at any time, and all ranks must carry one out after the same step. So ranks check for orders only after
agreed steps. At each check rank 0 reads the next order and writes it to the store, with the step of the next check,
about ``look_seconds`` later. The other ranks wait for that entry. Between checks a step costs nothing.

Without a rendezvous (no argument, no ``PATRICKSTAR_ELASTIC``) there are no orders, and the script trains as it was
started. Several ranks then save a checkpoint only at the end, since they have no checks at which to agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from patrickstar import _C
from patrickstar.elastic.batches import start_batch
from patrickstar.elastic.engine_protocol import ElasticEngine
from patrickstar.elastic.orders import Look, Order, OrderBoard, OrderKind, Outcome, OutcomeKind, RunReport
from patrickstar.elastic.phases import Membership, Next, RecoverySource, Resized
from patrickstar.elastic.rendezvous import ADDRESS_VARIABLE, CONNECT_SECONDS, Rendezvous, ResizeError
from patrickstar.elastic.run_batch import RunBatch, share
from patrickstar.elastic.run_checkpoint import RunCheckpoint
from patrickstar.elastic.survival import Redundancy, Survival, ending
from patrickstar.elastic.survivors import LeftBehindError
from patrickstar.ranks.failures import first_line, is_lost_rank
from patrickstar.ranks.passing import prepare_to_pass

JOINS_VARIABLE = "PATRICKSTAR_ELASTIC_JOINS"
"""The environment variable that is "1" in a process started to join a running run."""
_MOST_STEPS = 1000
_OWN_NAME = "patrickstar.elastic.ElasticRun"  # key among user state and in a checkpoint's client state


def joins_others() -> bool:
    """True if this process was started to join a running run."""
    return os.environ.get(JOINS_VARIABLE) == "1"


class ElasticRun:
    """A rank's part of a run whose number of ranks can change; see the module's docstring.

    The constructor of a process with ``PATRICKSTAR_ELASTIC_JOINS`` 1 joins the run. Another process continues from the
    checkpoint, if there is one; a sampler in ``user_state`` gets its ranks, where those that share samples
    count as one. Construct it after the optimizer, its schedule and the sampler, before the first step.

    Args:
        engine: from ``initialize_engine``.
        user_state: user state by name, as for ``Engine.resize``; it is also saved in checkpoints.
        checkpoint: a folder for checkpoints that all ranks can reach; None: none are saved.
        checkpoint_seconds: seconds between checkpoints.
        look_seconds: approximate seconds between checks for orders.
        redundancy: with :meth:`step`, what a lost rank costs. 1: a step, since each rank's shards are copied to the
            next rank after each step. 0: the steps since the last checkpoint. None: the run ends.
        rendezvous: "host:port"; None: that of ``PATRICKSTAR_ELASTIC``, or no orders.
        resize_options: further arguments of ``Engine.resize`` (``folder``, ``timeout_seconds``); a joining process uses
            ``folder``.

    Raises:
        ResizeError: this process could not join.
        ValueError: it should join and there is no rendezvous, or a number of seconds is not positive.
        SecretError: the file of the run's secret is missing, or open to other users.
        CheckpointError: the checkpoint is of another model, or damaged.
    """

    def __init__(
        self,
        engine: ElasticEngine,
        user_state: Mapping[str, Any],
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_seconds: float = 600.0,
        look_seconds: float = 1.0,
        redundancy: int | None = None,
        rendezvous: str | None = None,
        resize_options: Mapping[str, Any] | None = None,
    ):
        if min(look_seconds, checkpoint_seconds) <= 0:
            seconds = f"look_seconds is {look_seconds:g} and checkpoint_seconds {checkpoint_seconds:g}"
            raise ValueError(f"{seconds}; give more than 0")
        if _OWN_NAME in user_state:
            raise ValueError(f"user_state has a {_OWN_NAME!r}, the name of the run's own state; give it another name")
        self._engine = engine
        self._user_state = {**user_state, _OWN_NAME: self}
        self._kept = RunCheckpoint(engine, self._user_state, checkpoint, checkpoint_seconds)
        self._look_seconds = look_seconds
        self._options = dict(resize_options or {})
        address = os.environ.get(ADDRESS_VARIABLE) if rendezvous is None else rendezvous
        joins = joins_others()
        if joins and not address:
            raise ValueError(f"{JOINS_VARIABLE} is 1 and there is no rendezvous; set {ADDRESS_VARIABLE} to host:port")
        limit = min(engine.rank_timeout_seconds, CONNECT_SECONDS)
        self._meeting = Rendezvous.at(address, timeout_seconds=limit) if address else None
        self._board = OrderBoard(self._meeting.store) if self._meeting else None
        self.num_steps = 0
        """Optimizer steps since the run began, including those before this rank joined."""
        self.num_samples = 0
        """Samples of these steps; 0 if no user state has a batch."""
        self.batch = RunBatch(engine, user_state.values())
        self.num_lost = 0
        """Ranks that were lost so far, without which the run goes on."""
        self.next = Next.TRAIN
        """The last result of :meth:`step_done`, for scripts with :meth:`step`."""
        self._recoveries = 0
        self._next_look = 1
        self._next_order = 1
        self._loss: float | None = None
        self._until_end = contextlib.ExitStack()
        self.rank = int(os.environ.get("RANK", "0"))
        """This process's rank; -1 after it has left."""
        self.num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        """The present number of ranks."""
        if self._meeting is not None and not joins:
            prepare_to_pass(engine.device)
        if joins:
            own = {name: value for name, value in self._options.items() if name in ("folder", "note_phase")}
            self._place(engine.join(user_state=self._user_state, rendezvous=self._meeting, **own))
        else:
            self._load()
            start = start_batch()
            if start is not None:
                self.batch.set(start)
            self.batch.set_ranks(self.rank, self.num_ranks)
        self.batch.measure()
        self._leads = False
        self._begin_to_lead()
        self._survival: Survival | None = None
        if self._meeting is not None and redundancy is not None:
            self._survival = Survival(engine, self._meeting, self._user_state, Redundancy(redundancy))
            self._until_end.enter_context(self._survival.beating())
            with ending(self._until_end):
                self.copy_state()
        self._mark()

    def _begin_to_lead(self) -> None:
        if self._meeting is not None and self._board is not None and self.rank == 0 and not self._leads:
            self._leads = True
            self._next_order = self._board.first_open_order()
            self._until_end.enter_context(self._meeting.beating(_OWN_NAME))

    # User state of a resize and of checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The run's position, equal on all ranks."""
        return {
            "num_steps": self.num_steps,
            "num_samples": self.num_samples,
            "next_look": self._next_look,
            "saved_steps": self._kept.num_steps,
            "noise": self.batch.noise.state_dict(),
            "num_lost": self.num_lost,
            "recoveries": self._recoveries,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the position."""
        self.num_steps, self._next_look = state["num_steps"], state["next_look"]
        self._kept.num_steps = state["saved_steps"]
        # Checkpoints of earlier versions have neither, and one batch.
        self.num_samples = state.get("num_samples", self.num_steps * self.batch.global_batch)
        if "noise" in state:
            self.batch.noise.load_state_dict(state["noise"])
        self.num_lost = max(self.num_lost, state.get("num_lost", 0))  # copies are from before a recovery
        self._recoveries = max(self._recoveries, state.get("recoveries", 0))

    def check_ranks(self, num_ranks: int) -> None:
        """Accepts any number of ranks."""

    def set_ranks(self, rank: int, num_ranks: int) -> None:
        """Sets the rank and number of ranks. Called even if a signal handler raises at the end of a resize."""
        self.rank, self.num_ranks = rank, num_ranks

    # The script.

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step and its :meth:`step_done`: if a rank is lost within it, the ranks that are left repeat it.

        The block ends early then, without an error. Parameters, states and ``user_state`` are those after the last
        step that all had copied, so the next batch of an ``ElasticLoader`` has the samples of the step to repeat. If
        no number of the ranks divides the global batch, some of them leave (:attr:`next`).

        Raises:
            RankFailure: the others go on without this process, or there are neither copies nor a checkpoint.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_lost_rank(error):
                raise
            self.recover(error)

    def copy_state(self) -> None:
        """Copies the state after which a step is repeated, on all ranks. Only for scripts that change it themselves
        before the first step; other copies are made by this object.
        """
        if self._survival is not None:
            self._survival.copy(self.num_ranks)

    def recover(self, error: RuntimeError) -> None:
        """Goes on with the ranks that are left (:meth:`step`); otherwise raises ``error``."""
        if self._survival is None:
            raise error
        with ending(self._until_end):
            self._recover(self._survival, error)

    def step_done(self, loss: float | None = None) -> Next:
        """Must be called by all ranks after each optimizer step, and after schedules were stepped.

        Args:
            loss: the step's loss, for :class:`~patrickstar.elastic.RunReport`.

        Raises:
            RankFailure: the leader is gone, or a rank failed during a resize: end, and restart from the checkpoint.
        """
        self.num_steps += 1
        self.num_samples += self.batch.global_batch
        self.batch.note_step()
        self._loss = self._loss if loss is None else float(loss)
        if self._survival is not None and self.num_ranks > 1:
            self._survival.copy(self.num_ranks)
        self.next = Next.TRAIN if self.num_steps < self._next_look else self._look()
        return self.next

    def _look(self) -> Next:
        seen_at = time.monotonic()
        look = self._lead() if self.rank == 0 else self._follow()
        self._next_look = look.next_step
        stops = look.order is not None and look.order.kind is OrderKind.STOP
        if look.saves or stops:
            self._kept.save(self.num_steps)
        result = Next.TRAIN if look.order is None else self._carry_out(look.order, seen_at)
        self._mark()
        return result

    def _recover(self, survival: Survival, error: RuntimeError) -> None:
        for _ in range(self.num_ranks):  # each time at least one is lost
            self._recoveries += 1
            try:
                self._recover_once(survival, error)
                return
            except LeftBehindError:
                raise
            except _C.RankFailure as another:
                error = another
        raise error

    def _recover_once(self, survival: Survival, error: RuntimeError) -> None:
        recovered = survival.recover(error, self._recoveries, self._options)
        self._place(recovered.resized)
        if recovered.resized.membership is Membership.LEFT:
            self.next = Next.LEAVE
            self._until_end.close()
            return
        if recovered.source is RecoverySource.CHECKPOINT:
            if not self._load():
                raise LeftBehindError(f"{first_line(error)}: there are neither copies of its shards nor a checkpoint")
            share(self._user_state.values(), self.rank, self.num_ranks)
        self.batch.measure()
        self.num_lost += recovered.num_lost
        self.next = Next.TRAIN
        self._begin_to_lead()
        if self.rank == 0:
            self._next_order = survival.refuse_resizes(self._next_order, f"a rank was lost: {first_line(error)}")
        survival.copy(self.num_ranks)
        self._mark()
        if self.rank == 0:
            self._report(has_ended=False)

    def end(self) -> None:
        """Ends the run: saves a last checkpoint if checkpoints are kept, and reports the end. For all ranks that have
        not left. The engine stays open.
        """
        if self.rank < 0:
            return
        self._kept.save(self.num_steps)
        if self.rank == 0:
            self._report(has_ended=True)
        self._until_end.close()

    def go_on_from(self, num_steps: int, num_samples: int) -> None:
        """Sets the position of a checkpoint that the script itself has loaded, before the first :meth:`step_done`."""
        self.num_steps = self._kept.num_steps = self._marked_steps = num_steps
        self.num_samples = num_samples
        self._next_look = num_steps + 1

    def note_checkpoint(self, num_steps: int) -> None:
        """Records a checkpoint of that step, saved by the script itself."""
        self._kept.note(num_steps)

    # Checks for orders.

    def _lead(self) -> Look:
        seconds = max(time.monotonic() - self._marked_at, 1e-9)
        steps = round(self._look_seconds * (self.num_steps - self._marked_steps) / seconds)
        look = Look(
            order=self._board.order(self._next_order) if self._board else None,
            next_step=self.num_steps + max(1, min(_MOST_STEPS, steps)),
            saves=self._kept.is_due,
        )
        self._report(has_ended=False)
        if self.num_ranks > 1:
            if self._board is None:  # other ranks cannot learn of a check
                return dataclasses.replace(look, next_step=sys.maxsize, saves=False)
            self._board.tell(self.num_steps, look, recoveries=self._recoveries)
        return look

    def _follow(self) -> Look:
        if self._meeting is None or self._board is None:
            return Look(order=None, next_step=sys.maxsize, saves=False)
        try:
            key = self._board.look_key(self.num_steps, recoveries=self._recoveries)
            self._meeting.await_key(key, beating=_OWN_NAME)
        except ResizeError as error:
            raise _C.RankFailure(f"rank {self.rank} waits for rank 0 to say what is ordered: {error}") from error
        return self._board.told(self.num_steps, recoveries=self._recoveries)

    def _carry_out(self, order: Order, seen_at: float) -> Next:
        if order.kind is OrderKind.STOP:
            self._conclude(OutcomeKind.DONE, "", seen_at)
            self.end()
            return Next.STOP
        before = self.batch.states()
        try:
            if self._survival is not None and self.num_ranks == 1 < order.num_ranks:
                self._survival.copy_alone()
            if order.global_batch:
                self.batch.set(order.global_batch)
            if order.global_batch and order.num_ranks == self.num_ranks and order.leaving is None:
                self.batch.set_ranks(self.rank, self.num_ranks)
            else:
                self._place(self._resized(order))
        except (_C.StateError, ValueError) as error:  # includes ResizeError: the ranks are unchanged
            self.batch.restore(before)
            self._conclude(OutcomeKind.REFUSED, first_line(error), seen_at)
            return Next.TRAIN
        if self.rank < 0:
            self._until_end.close()
            return Next.LEAVE
        self.batch.measure()
        self.copy_state()  # a rank that is lost before takes the order back
        self._conclude(OutcomeKind.DONE, "", seen_at)
        return Next.TRAIN

    def _resized(self, order: Order) -> Resized:
        common = {"user_state": self._user_state, "rendezvous": self._meeting, **self._options}
        return self._engine.resize(order.num_ranks, leaving=order.leaving, **common)

    def _conclude(self, kind: OutcomeKind, reason: str, seen_at: float) -> None:
        if self.rank == 0 and self._board is not None:
            self._board.conclude(self._next_order, Outcome(kind, reason, time.monotonic() - seen_at))
            self._next_order += 1

    def _report(self, *, has_ended: bool) -> None:
        if self._board is None:
            return
        steps, seconds = self.num_steps - self._marked_steps, time.monotonic() - self._marked_at
        self._board.write_report(
            RunReport(
                num_steps=self.num_steps,
                num_ranks=self.num_ranks,
                seconds_per_step=seconds / steps if steps else 0.0,
                loss=self._loss,
                checkpoint_steps=self._kept.num_steps, has_ended=has_ended,
                num_samples=self.num_samples,
                global_batch=self.batch.global_batch,
                noise_scale=self.batch.noise.scale,
                num_lost=self.num_lost,
                redundancy=None if self._survival is None else int(self._survival.redundancy),
                num_parameters=self._engine.num_parameters,
            )
        )  # fmt: skip

    def _mark(self) -> None:
        self._marked_at, self._marked_steps = time.monotonic(), self.num_steps

    def _place(self, resized: Resized) -> None:
        self.set_ranks(resized.rank, resized.num_ranks)

    def _load(self) -> bool:
        """Loads the last checkpoint; False if there is none."""
        lost = self.num_lost, self._recoveries  # the checkpoint's are of an earlier start
        if not self._kept.load():
            return False
        (self.num_lost, self._recoveries), self._next_look = lost, self.num_steps + 1
        return True

"""A job's processes on Ray: an actor for each rank, in a placement group, and one for the job, which owns them.

The job's actor is detached: it and its ranks outlive the scheduler. If it dies, its ranks die too, and the job
continues from its checkpoint.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from patrickstar.elastic import Orders, OutcomeKind
from patrickstar.elastic.batches import batch_environment
from patrickstar.elastic.rendezvous import ADDRESS_VARIABLE, ServedRendezvous
from patrickstar.elastic.run import JOINS_VARIABLE
from patrickstar.ones.cluster.fleet import JobPhase, Status
from patrickstar.ones.cluster.rank_process import RankProcess
from patrickstar.ones.cluster.submission import Submission
from patrickstar.ranks.addresses import listen
from patrickstar.ranks.run_secret import SECRET_VARIABLE, RunSecret

_GPUS_WAIT_SECONDS = 20.0
_START_SECONDS = 300.0
"""Time for the actors of ranks to start, even on a loaded node."""
_ANSWER_SECONDS = 30.0


class _Ranks:
    """Ranks that were started together. Each has its own placement group, so that its GPU is free when it leaves.

    Raises:
        RuntimeError: the GPUs were not free in time, or their processes did not start; none is kept then.
    """

    def __init__(self, count: int):
        groups = [placement_group([{"GPU": 1}], strategy="PACK") for _ in range(count)]
        try:
            ray.get([group.ready() for group in groups], timeout=_GPUS_WAIT_SECONDS)
        except ray.exceptions.GetTimeoutError as error:
            for group in groups:
                remove_placement_group(group)
            raise RuntimeError(f"{count} GPUs were not free within {_GPUS_WAIT_SECONDS:g} s") from error
        rank_actor = ray.remote(num_cpus=0, num_gpus=1)(RankProcess)
        self._groups = {
            rank_actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote(): group
            for group in groups
        }
        try:
            self.places = ray.get([actor.place.remote() for actor in self.actors], timeout=_START_SECONDS)
            """The result of :meth:`RankProcess.place` for each."""
        except ray.exceptions.RayError as error:
            for actor in self.actors:
                self.drop(actor)
            raise RuntimeError(f"processes on {count} GPUs did not start: {error}") from error

    @property
    def actors(self) -> list[Any]:
        """The remaining actors, in the order of their ranks at the start."""
        return list(self._groups)

    def drop(self, actor: Any) -> None:
        """Ends a rank and frees its GPU."""
        ray.kill(actor)
        remove_placement_group(self._groups.pop(actor))


class JobProcesses:
    """An actor: one job's ranks, their rendezvous, and the orders to them. The constructor starts the ranks, so the job
    runs even if the scheduler dies at once.
    """

    def __init__(self, plain: dict[str, Any], logs: str, num_ranks: int, global_batch: int):
        self._submission = Submission.of(plain)
        self._logs = Path(logs, self._submission.name)
        self._host = ray.util.get_node_ip_address()
        self._secret = RunSecret.random()
        self._store = ServedRendezvous(listen(self._host, 0), self._secret)
        self._orders = Orders(self._store)
        self._groups: list[_Ranks] = []
        self._joining: _Ranks | None = None
        self._number = 0  # of the order in progress; 0: none
        self._num_ranks = 0
        self._first_batch = global_batch
        self._ordered_ranks = 0
        self._stops = False
        self._num_started = 0
        self._resize_s = 0.0
        self._refusal = ""
        self._failure = ""
        self._start(num_ranks)

    def _start(self, num_ranks: int) -> None:
        try:
            group = _Ranks(num_ranks)
        except RuntimeError as error:  # no fault of the job
            self._refusal, self._stops = str(error), True
            return
        self._groups.append(group)
        places = group.places
        nodes = [node for node, _, _ in places]
        here: Counter[str] = Counter()
        for rank, (actor, node) in enumerate(zip(group.actors, nodes, strict=True)):
            gpus = [gpu for other, _, ids in places if other == node for gpu in ids]
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), JOINS_VARIABLE: "0"}
            if num_ranks > 1:  # for a single process with rank variables, Accelerate would initialise torch.distributed
                environment |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(num_ranks),
                    "LOCAL_RANK": str(here[node]),
                    "LOCAL_WORLD_SIZE": str(nodes.count(node)),
                    "MASTER_ADDR": places[0][0],
                    "MASTER_PORT": str(places[0][1]),
                }
            here[node] += 1
            self._launch(actor, environment)
        self._num_ranks = num_ranks

    def resize(self, num_ranks: int, global_batch: int) -> None:
        """Orders ranks and a batch, and starts joining ranks."""
        self._refusal = ""
        if num_ranks > self._num_ranks:
            try:
                self._joining = _Ranks(num_ranks - self._num_ranks)
            except RuntimeError as error:
                self._refusal = str(error)
                return
            for actor, (_, _, gpus) in zip(self._joining.actors, self._joining.places, strict=True):
                self._launch(actor, {"CUDA_VISIBLE_DEVICES": ",".join(gpus), JOINS_VARIABLE: "1"})
        self._ordered_ranks = num_ranks
        fixed = self._submission.batches.is_fixed
        self._number = self._orders.resize(num_ranks, global_batch=0 if fixed else global_batch)

    def stop(self) -> None:
        """Orders the ranks to end with a checkpoint."""
        self._stops = True
        self._number = self._orders.stop()

    def end(self) -> None:
        """Kills all ranks; none runs when this returns."""
        groups = [*self._groups, *([self._joining] if self._joining else [])]
        for group in groups:
            with contextlib.suppress(ray.exceptions.RayError):  # its node is gone
                ray.get([actor.kill.remote() for actor in group.actors], timeout=_ANSWER_SECONDS)
            for actor in group.actors:
                group.drop(actor)

    def status(self) -> Status:
        """The job's present status."""
        self._note_outcome()
        for group in list(self._groups):
            for actor in group.actors:
                self._note_exit(group, actor)
            if not group.actors:
                self._groups.remove(group)
        if not self._groups:
            self._note_outcome()  # the outcome may have come with the end
        if not self._groups:  # the run is over, and joining processes will not be invited
            self._send_away(self._joining)
            self._joining, self._number = None, 0
        if self._failure:
            phase = JobPhase.FAILED
        elif not self._groups:
            phase = JobPhase.STOPPED if self._stops else JobPhase.ENDED
        elif self._number or sum(len(group.actors) for group in self._groups) > self._num_ranks:
            phase = JobPhase.CHANGING
        else:
            phase = JobPhase.RUNNING
        held = self._num_ranks + (len(self._joining.actors) if self._joining else 0)
        return Status(phase, held, self._orders.report(), self._resize_s, self._refusal, self._failure)

    def _launch(self, actor: Any, environment: dict[str, str]) -> None:
        self._num_started += 1
        submission = self._submission
        words = [submission.script, *submission.arguments]
        batch = batch_environment(submission.batches, self._first_batch)
        environment = {**dict(submission.environment), **batch, **environment, ADDRESS_VARIABLE: self._store.address}
        log = self._logs / f"{self._num_started}.log"
        secret = (SECRET_VARIABLE, self._secret.hex())
        started = actor.start.remote(words, submission.folder, environment, secret, str(log))
        ray.get(started, timeout=_ANSWER_SECONDS)

    def _note_outcome(self) -> None:
        outcome = self._orders.outcome(self._number) if self._number else None
        if outcome is None:
            return
        self._number = 0
        if self._stops:
            return
        joined, self._joining = self._joining, None
        if outcome.kind is OutcomeKind.REFUSED:
            self._refusal = outcome.reason
            self._send_away(joined)
            return
        if self._ordered_ranks != self._num_ranks:
            self._resize_s, self._num_ranks = outcome.seconds, self._ordered_ranks
        if joined is not None:
            self._groups.append(joined)

    def _send_away(self, joining: _Ranks | None) -> None:
        for actor in joining.actors if joining else []:
            joining.drop(actor)

    def _note_exit(self, group: _Ranks, actor: Any) -> None:
        try:
            status = ray.get(actor.poll.remote(), timeout=_ANSWER_SECONDS)
            if status is None:
                return
            tail = "" if status == 0 else ray.get(actor.tail.remote(), timeout=_ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return  # polled again later
        except ray.exceptions.RayError as error:
            status, tail = -1, f"its actor is gone: {error}"
        group.drop(actor)
        if status != 0 and not self._failure:
            self._failure = f"a rank ended with {status}:\n{tail}"

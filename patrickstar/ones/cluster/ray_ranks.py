"""A job's processes on Ray: an actor for each rank, and one for the job, which owns them.

The job's actor is detached: it and its ranks outlive the scheduler. If it dies, its ranks die too, and the job
continues from its checkpoint. If a rank dies, the others go on if their run has redundancy; else the job continues from
its checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray

from patrickstar.elastic import Orders, OutcomeKind
from patrickstar.elastic.batches import batch_environment
from patrickstar.elastic.rendezvous import ADDRESS_VARIABLE, ServedRendezvous
from patrickstar.elastic.run import JOINS_VARIABLE
from patrickstar.ones.cluster.fleet import JobPhase, Status
from patrickstar.ones.cluster.ray_placement import PlacedRanks
from patrickstar.ones.cluster.submission import Submission
from patrickstar.ranks.addresses import listen
from patrickstar.ranks.run_secret import SECRET_VARIABLE, RunSecret

_ANSWER_SECONDS = 30.0
_RECOVERY_SECONDS = 120.0
"""Time for a run with redundancy to go on without a lost rank."""


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
        self._groups: list[PlacedRanks] = []
        self._joining: PlacedRanks | None = None
        self._number = 0  # of the order in progress; 0: none
        self._num_ranks = 0
        self._first_batch = global_batch
        self._ordered_ranks = 0
        self._stops = False
        self._num_started = 0
        self._resize_s = 0.0
        self._refusal = ""
        self._failure = ""
        self._lost: list[str] = []  # the end of each lost rank
        self._lost_at = 0.0
        self._start(num_ranks)

    def _start(self, num_ranks: int) -> None:
        try:
            group = PlacedRanks(num_ranks, self._submission, set())
        except RuntimeError as error:  # no fault of the job
            self._refusal, self._stops = str(error), True
            return
        self._groups.append(group)
        places = group.places
        nodes = [place.node_id for place in places]
        here: Counter[str] = Counter()
        for rank, (actor, node) in enumerate(zip(group.actors, nodes, strict=True)):
            gpus = [gpu for place in places if place.node_id == node for gpu in place.gpus]
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), JOINS_VARIABLE: "0"}
            if num_ranks > 1:  # for a single process with rank variables, Accelerate would initialise torch.distributed
                environment |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(num_ranks),
                    "LOCAL_RANK": str(here[node]),
                    "LOCAL_WORLD_SIZE": str(nodes.count(node)),
                    "MASTER_ADDR": places[0].address,
                    "MASTER_PORT": str(places[0].port),
                }
            here[node] += 1
            self._launch(actor, environment)
        self._num_ranks = num_ranks

    def resize(self, num_ranks: int, global_batch: int) -> None:
        """Orders ranks and a batch, and starts joining ranks."""
        self._refusal = ""
        if num_ranks > self._num_ranks:
            try:
                present = {node for group in self._groups for node in group.nodes}
                self._joining = PlacedRanks(num_ranks - self._num_ranks, self._submission, present)
            except RuntimeError as error:
                self._refusal = str(error)
                return
            for actor, place in zip(self._joining.actors, self._joining.places, strict=True):
                self._launch(actor, {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus), JOINS_VARIABLE: "1"})
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
        goes_on = self._goes_on_without_lost_ranks()
        if not self._groups:
            self._note_outcome()  # the outcome may have come with the end
        if not self._groups:  # the run is over, and joining processes will not be invited
            self._send_away(self._joining)
            self._joining, self._number = None, 0
        if self._failure:
            phase = JobPhase.FAILED
        elif not self._groups:
            phase = JobPhase.STOPPED if self._stops else JobPhase.ENDED
        elif self._number or not goes_on or self._num_running > self._num_ranks:
            phase = JobPhase.CHANGING
        else:
            phase = JobPhase.RUNNING
        held = self._num_ranks + (len(self._joining.actors) if self._joining else 0)
        return Status(
            phase,
            held,
            self._orders.report(),
            self._resize_s,
            self._refusal,
            self._failure,
            gpu_type=self._submission.gpu_type,
            num_lost=len(self._lost),
        )

    @property
    def _num_running(self) -> int:
        return sum(len(group.actors) for group in self._groups)

    def _goes_on_without_lost_ranks(self) -> bool:
        """False while ranks that are left have not gone on yet; a failure if they do not."""
        if not self._lost:
            return True
        report = self._orders.report()
        if report is not None and report.num_lost >= len(self._lost):
            self._num_ranks = self._num_ranks if self._number else report.num_ranks
            return True
        if report is None or report.redundancy is None or not self._groups:
            first = next((one for one in self._lost if "RankFailure" not in one), self._lost[0])
            self._failure = self._failure or first
        elif time.monotonic() - self._lost_at > _RECOVERY_SECONDS:
            self._failure = f"the other ranks did not go on: {self._lost[-1]}"
        return False

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

    def _send_away(self, joining: PlacedRanks | None) -> None:
        for actor in joining.actors if joining else []:
            joining.drop(actor)

    def _note_exit(self, group: PlacedRanks, actor: Any) -> None:
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
        if status != 0:
            self._lost.append(f"a rank ended with {status}:\n{tail}")
            self._lost_at = time.monotonic()

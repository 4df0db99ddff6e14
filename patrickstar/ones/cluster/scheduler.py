"""Turns a policy's decisions into orders to jobs, tick by tick. The policy is the code that is simulated.

A tick reads every job's status from the fleet, passes it to the policy, and orders its grants as far as GPUs are free.
GPUs of a shrinking or stopping job are granted to another one in a later tick, when its processes have left them. A job
is left alone while an order to it is in progress, before its first report, and always if its script is not elastic.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping

from patrickstar.ones.cluster.fleet import Fleet, JobPhase, Status
from patrickstar.ones.cluster.ledger import End, Entry, Ledger, Measured
from patrickstar.ones.cluster.rows import Row, in_a_line
from patrickstar.ones.cluster.shares import decide_in_classes
from patrickstar.ones.cluster.submission import Submission
from patrickstar.ones.jobs import Cluster, Job, JobState, StepTime
from patrickstar.ones.measurements import fitted_throughput
from patrickstar.ones.policies.protocol import Foresight, Grant, Policy

MOST_FAILURES = 3
"""Failures without a step between them after which a job is abandoned."""
_UNKNOWN_RESIZE_S = 10.0
_APPEARS_S = 30.0  # seconds after a job's start until its processes exist


@dataclasses.dataclass
class _Track:
    """State of a job that has not ended, beside its ledger entry."""

    gpus: tuple[int, ...] = ()
    """GPUs that it holds, by the policy's numbers; Ray decides their location."""
    ordered: tuple[int, ...] | None = None
    """GPUs that it will hold after the order in progress."""
    has_reported: bool = False
    """True if it has reported since its start."""
    status: Status | None = None
    observed: dict[int, float] = dataclasses.field(default_factory=dict)
    """Seconds of a step by number of ranks."""
    num_steps: int = 0
    steps_at_change: int = 0
    steps_at_failure: int = -1
    failures_since_step: int = 0
    seen_s: float | None = None
    changed_s: float = 0.0
    left_s: float | None = None
    """Time at which it last lost its GPUs."""
    run_s: float = 0.0
    gpu_s: float = 0.0
    num_resizes: int = 0
    most_gpus: int = 0
    first_loss: float = 0.0
    loss: float = 0.0
    resize_s: float = 0.0
    start_s: float = 0.0
    """Seconds from a start to the first report."""
    note: str = ""


class Scheduler:
    """Decides and orders; see the module's docstring. For one thread at a time.

    Args:
        ledger: records the jobs.
        fleet: runs them.
        policy: decides.
        cluster: the cluster for the policy.
        clock: seconds since 1970.
        quotas: most GPUs of a user's jobs together.

    Raises:
        ValueError: the policy needs to know remaining work, which is unknown on a real cluster.
    """

    def __init__(
        self,
        ledger: Ledger,
        fleet: Fleet,
        policy: Policy,
        cluster: Cluster,
        clock: Callable[[], float] = time.time,
        quotas: Mapping[str, int] | None = None,
    ):
        if policy.foresight is not Foresight.NONE:
            raise ValueError(
                f"{type(policy).__name__} needs to know how much work each job has left, which only a simulator "
                "knows; choose another policy"
            )
        self.cluster = cluster
        self._quotas = dict(quotas or {})
        self._gpus_by_type: dict[str, int] | None = None
        self._ledger, self._fleet, self._policy, self._clock = ledger, fleet, policy, clock
        self._tracks: dict[str, _Track] = {}
        for name, entry in ledger.entries.items():
            if entry.end is not None:  # an earlier scheduler may have died after its ledger entry and before this call
                fleet.remove(name)
                self._recall(name, entry)

    def submit(self, submission: Submission) -> None:
        """Accepts a job, which is recorded from now on.

        Raises:
            ValueError: the cluster can never run it, or its name is in use.
        """
        submission.check(self.cluster)
        there = self._num_gpus_for(submission)
        if submission.sizes[0] > there:
            raise ValueError(
                f"job {submission.name} needs at least {submission.sizes[0]} GPUs of type {submission.gpu_type} and "
                f"the cluster has {there}; lower its min_gpus, or leave the type out"
            )
        self._ledger.submitted(submission)

    def cancel(self, name: str) -> None:
        """Ends a job at once.

        Raises:
            ValueError: there is no such waiting or running job.
        """
        entry = self._ledger.entries.get(name)
        if entry is None or entry.end is not None:
            raise ValueError(f"there is no job {name} that waits or runs; `status` shows which do")
        self._end(name, End.CANCELLED)

    def tick(self) -> None:
        """Reads all jobs' status, decides, and orders."""
        now = self._clock()
        for name, entry in list(self._open()):
            self._look_at(now, name, entry)
        states = [self._state(now, entry) for _, entry in self._open() if self._fits(entry.submission)]
        if states and max(self._taken(), default=-1) < self.cluster.num_gpus:  # else GPUs that are gone are held still
            submissions = {name: entry.submission for name, entry in self._open()}
            grants = decide_in_classes(self._policy, now, states, submissions, self.cluster, self._quotas)
            self._order(now, grants)

    def see_cluster(self, cluster: Cluster, gpus_by_type: Mapping[str, int]) -> None:
        """Takes notice of nodes that have come or gone. Jobs keep as many GPUs as they have, by new numbers.

        Args:
            cluster: as it is now.
            gpus_by_type: numbers of GPUs by type.
        """
        self._gpus_by_type = dict(gpus_by_type)
        if cluster == self.cluster:
            return
        self.cluster = cluster
        held = (sorted({*track.gpus, *(track.ordered or ())}) for track in self._tracks.values())
        numbers = {old: new for new, old in enumerate(itertools.chain.from_iterable(held))}
        for track in self._tracks.values():
            track.gpus = tuple(numbers[gpu] for gpu in track.gpus)
            track.ordered = None if track.ordered is None else tuple(numbers[gpu] for gpu in track.ordered)

    def _num_gpus_for(self, submission: Submission) -> int:
        if self._gpus_by_type is None or not submission.gpu_type:
            return self.cluster.num_gpus
        return self._gpus_by_type.get(submission.gpu_type, 0)

    def _fits(self, submission: Submission) -> bool:
        """False for a job that this cluster cannot run now, since nodes are gone."""
        return submission.sizes[0] <= min(self.cluster.num_gpus, self._num_gpus_for(submission))

    def rows(self) -> list[Row]:
        """All jobs, in order of submission."""
        return [self._row(name, entry) for name, entry in self._ledger.entries.items()]

    # A tick.

    def _open(self) -> Iterator[tuple[str, Entry]]:
        return ((name, entry) for name, entry in self._ledger.entries.items() if entry.end is None)

    def _look_at(self, now: float, name: str, entry: Entry) -> None:
        track = self._tracks.setdefault(name, _Track())
        before, status = track.status, self._fleet.status(name)
        if status is None and track.gpus and before is None and now - track.changed_s < _APPEARS_S:
            return  # it was just started
        if status is None and track.gpus:
            status = Status(JobPhase.FAILED, 0, None, 0.0, reason="its processes are gone, with the node they were on")
        track.status = status
        if track.gpus and track.seen_s is not None:
            track.run_s += now - track.seen_s
            track.gpu_s += (now - track.seen_s) * len(track.gpus)
        track.seen_s = now
        if status is None:
            return
        if not track.gpus or self._follows_an_order_unknown(track, status):  # this scheduler is new, the job is not
            track.gpus = ()
            track.gpus, track.changed_s = self._any_gpus(status.num_ranks), now
        self._note_report(now, track, status)
        if status.phase is JobPhase.ENDED:
            self._policy.finished(now, self._state(now, entry))
            self._end(name, End.FINISHED)
        elif status.phase is JobPhase.STOPPED:
            self._evict_all(name, track)
        elif status.phase is JobPhase.FAILED:
            if track.num_steps > track.steps_at_failure:
                track.failures_since_step = 0
            track.failures_since_step += 1
            track.steps_at_failure = track.num_steps
            if track.failures_since_step >= MOST_FAILURES:
                self._end(name, End.FAILED, status.reason)
                return
            self._evict_all(name, track)  # first, so that only one scheduler counts the failure
            self._ledger.failed(name, status.reason)

    @staticmethod
    def _follows_an_order_unknown(track: _Track, status: Status) -> bool:
        """True if the job has carried out an order of an earlier scheduler."""
        return track.ordered is None and status.phase is JobPhase.RUNNING and status.num_ranks != len(track.gpus)

    def _note_report(self, now: float, track: _Track, status: Status) -> None:
        report = status.report
        track.note = status.refusal or (f"goes on without {status.num_lost} lost ranks" if status.num_lost else "")
        if report is not None:
            if not track.has_reported:
                track.has_reported, track.start_s = True, now - track.changed_s
            track.num_steps = max(track.num_steps, report.num_steps)
            if report.seconds_per_step > 0:
                track.observed[report.num_ranks] = report.seconds_per_step
            if report.loss is not None:
                track.first_loss = track.first_loss or report.loss
                track.loss = report.loss
        elif not track.note and status.phase is JobPhase.RUNNING:
            track.note = "no report yet: its ranks stay as they are (a script without ElasticRun never reports)"
        if status.phase is not JobPhase.RUNNING or track.ordered is None:
            return
        if len(track.ordered) == status.num_ranks:
            track.gpus = track.ordered
            track.num_resizes += 1
            track.resize_s = status.resize_s
        track.ordered, track.changed_s, track.steps_at_change = None, now, track.num_steps

    def _end(self, name: str, end: End, reason: str = "") -> None:
        track = self._tracks.setdefault(name, _Track())
        self._ledger.ended(name, end, reason, Measured(track.num_steps, track.loss, track.observed))
        self._evict_all(name, track)

    def _recall(self, name: str, entry: Entry) -> None:
        """Shows and learns what an earlier scheduler measured of a job that ended."""
        found = entry.measured
        self._tracks[name] = _Track(num_steps=found.num_steps, loss=found.loss, observed=dict(found.observed))
        if entry.end is End.FINISHED and found.observed:
            self._policy.finished(entry.submitted_s, self._state(entry.submitted_s, entry))

    def _evict_all(self, name: str, track: _Track) -> None:
        self._fleet.remove(name)
        track.left_s = track.seen_s if track.gpus else track.left_s
        track.gpus, track.ordered, track.status, track.has_reported = (), None, None, False

    def _order(self, now: float, grants: dict[str, Grant]) -> None:
        shrinks_first = sorted(self._open(), key=lambda item: len(grants[item[0]].gpus) if item[0] in grants else 0)
        for name, entry in shrinks_first:
            track, grant = self._tracks.setdefault(name, _Track()), grants.get(name)
            if not track.gpus and track.status is None:
                gpus = self._room(grant, track, entry.submission)
                if gpus:
                    self._start(now, track, entry.submission, gpus)
            elif not self._may_change(track):
                continue
            elif grant is None:
                track.ordered = track.gpus
                self._fleet.stop(name)
            elif len(grant.gpus) != len(track.gpus) and (gpus := self._room(grant, track, entry.submission)):
                track.ordered = gpus
                self._fleet.resize(name, len(gpus))

    def _start(self, now: float, track: _Track, submission: Submission, gpus: tuple[int, ...]) -> None:
        self._fleet.start(submission, len(gpus))
        track.gpus, track.changed_s, track.steps_at_change = gpus, now, track.num_steps
        track.most_gpus = max(track.most_gpus, len(gpus))

    def _may_change(self, track: _Track) -> bool:
        status = track.status
        return (
            track.ordered is None
            and status is not None
            and status.phase is JobPhase.RUNNING
            and status.report is not None
            and not status.report.has_ended
        )

    def _taken(self) -> set[int]:
        return {gpu for track in self._tracks.values() for gpu in (*track.gpus, *(track.ordered or ()))}

    def _room(self, grant: Grant | None, track: _Track, submission: Submission) -> tuple[int, ...]:
        """GPUs for the grant: the job's own, then free ones; empty if there are too few.

        Only the number counts, since Ray decides the location. So two jobs never wait for each other's GPUs.
        """
        count = len(grant.gpus) if grant is not None else 0
        kept = track.gpus[:count]
        gpus = tuple(sorted((*kept, *self._any_gpus(count - len(kept)))))
        return gpus if len(gpus) == count and count <= self._quota_left(submission) else ()

    def _quota_left(self, submission: Submission) -> float:
        """GPUs that other jobs of its user leave it, also those that are leaving theirs."""
        others = (name for name, entry in self._open() if entry.submission.user == submission.user)
        tracks = (self._tracks[name] for name in others if name != submission.name and name in self._tracks)
        held = sum(len({*track.gpus, *(track.ordered or ())}) for track in tracks)
        return self._quotas.get(submission.user, math.inf) - held

    def _any_gpus(self, count: int) -> tuple[int, ...]:
        taken = self._taken()
        return tuple([gpu for gpu in range(self.cluster.num_gpus) if gpu not in taken][:count])

    # Input of the policy.

    def _state(self, now: float, entry: Entry) -> JobState:
        submission = entry.submission
        track = self._tracks.setdefault(submission.name, _Track())
        batch = submission.global_batch
        seen = float(track.num_steps * batch)
        observed = self._observed(submission, track)
        return JobState(
            job=self._job(entry, track, observed),
            gpus=track.ordered or track.gpus,
            batch_size=batch if track.gpus else 0,
            done_samples=seen,
            seen_samples=seen,
            gpu_s=track.gpu_s,
            run_s=track.run_s,
            num_resizes=track.num_resizes,
            samples_since_resize=float((track.num_steps - track.steps_at_change) * batch),
            run_since_resize_s=now - track.changed_s if track.gpus else 0.0,
            waited_s=0.0 if track.gpus else now - (track.left_s or entry.submitted_s),
            most_gpus=track.most_gpus,
            observed=observed,
            initial_loss=track.first_loss,
            loss=track.loss,
            accuracy=0.0,
        )

    def _observed(self, submission: Submission, track: _Track) -> tuple[StepTime, ...]:
        """Measured steps; before any, the planner's predictions."""
        known = track.observed or dict(submission.planned)
        per_node = self.cluster.gpus_per_node
        return tuple(
            StepTime(num_gpus, math.ceil(num_gpus / per_node), submission.global_batch, seconds)
            for num_gpus, seconds in known.items()
        )

    def _job(self, entry: Entry, track: _Track, observed: tuple[StepTime, ...]) -> Job:
        submission, sizes = entry.submission, entry.submission.sizes
        least, most = submission.min_gpus, submission.max_gpus
        sizes = tuple(size for size in sizes if size <= self._num_gpus_for(submission)) or sizes[:1]
        if track.gpus and (submission.inner_group > 1 or not self._may_change(track)):
            held = len(track.ordered or track.gpus)
            sizes, least, most = (held,), min(held, least), max(held, most)
        return Job(
            name=submission.name,
            arrival_s=entry.submitted_s,
            min_gpus=least,
            max_gpus=most,
            requested_gpus=submission.requested_gpus,
            gpu_batch=max(1, submission.global_batch // submission.requested_gpus),
            base_batch=submission.global_batch,
            max_batch=submission.global_batch,
            epoch_samples=submission.epoch_samples,
            throughput=fitted_throughput(observed, submission.global_batch),
            noise_scale=0.0,
            resize_s=track.resize_s or track.start_s or _UNKNOWN_RESIZE_S,
            feasible_gpus=sizes,
        )

    def _row(self, name: str, entry: Entry) -> Row:
        track = self._tracks.get(name, _Track())
        state = "waiting"
        if entry.end is not None:
            state = entry.end.value
        elif track.status is not None:
            state = track.status.phase.value
        elif track.gpus:
            state = "starting"
        note = track.note if entry.end is None and track.note else entry.reason
        return Row(
            name=name,
            state=state,
            num_gpus=len(track.gpus),
            num_steps=track.num_steps,
            seconds_per_step=track.observed.get(len(track.gpus), 0.0),
            loss=track.loss or None,
            num_resizes=track.num_resizes,
            resize_s=track.resize_s,
            num_failures=entry.num_failures,
            note=in_a_line(note),
        )

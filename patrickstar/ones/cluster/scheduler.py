"""Turns a policy's decisions into orders to jobs, tick by tick. The policy is the code that is simulated.

A tick reads every job's status from the fleet, passes it to the policy, and orders its grants as far as GPUs are free.
GPUs of a shrinking or stopping job are granted to another one in a later tick, when its processes have left them. A job
is left alone while an order to it is in progress, before its first report, and always if its script is not elastic.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator

from patrickstar.ones.cluster.fleet import Fleet, JobPhase, Status
from patrickstar.ones.cluster.ledger import End, Entry, Ledger, Measured
from patrickstar.ones.cluster.progress import Progress
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
    batch: int = 0
    """Its global batch; 0: not known yet."""
    ordered_batch: int = 0
    has_reported: bool = False
    """True if it has reported since its start."""
    status: Status | None = None
    observed: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    """Seconds of a step by number of ranks and global batch."""
    progress: Progress = dataclasses.field(default_factory=Progress)
    num_steps: int = 0
    steps_at_order: int = 0
    """Steps when the last order was done; a report of more steps has the batch since then."""
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


@dataclasses.dataclass(frozen=True)
class Row:
    """A job as ``status`` shows it."""

    name: str
    state: str
    """Waiting, a phase of the fleet, or the final state."""
    num_gpus: int
    global_batch: int
    """0: not started."""
    noise_scale: float
    """In samples; 0: unknown."""
    num_steps: int
    seconds_per_step: float
    """0: not measured yet."""
    loss: float | None
    num_resizes: int
    resize_s: float
    """Seconds of its last resize."""
    num_failures: int
    note: str


class Scheduler:
    """Decides and orders; see the module's docstring. For one thread at a time.

    Args:
        ledger: records the jobs.
        fleet: runs them.
        policy: decides.
        cluster: the cluster for the policy.
        clock: seconds since 1970.

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
    ):
        if policy.foresight is not Foresight.NONE:
            raise ValueError(
                f"{type(policy).__name__} needs to know how much work each job has left, which only a simulator "
                "knows; choose another policy"
            )
        self.cluster = cluster
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
        states = [self._state(now, entry) for _, entry in self._open()]
        if states:
            self._order(now, dict(self._policy.decide(now, states, self.cluster)))

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
        self._note_report(now, track, status, entry.submission)
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

    def _note_report(self, now: float, track: _Track, status: Status, submission: Submission) -> None:
        report = status.report
        track.note = status.refusal
        if report is not None:
            if not track.has_reported:
                track.has_reported, track.start_s = True, now - track.changed_s
            track.num_steps = max(track.num_steps, report.num_steps)
            first = submission.global_batch
            batch = first if submission.batches.is_fixed else report.global_batch or first
            is_news = track.ordered is None and report.num_steps > track.steps_at_order
            if batch != track.batch and (is_news or not track.batch):
                track.progress.fold()
                track.batch = batch
            samples = report.num_samples or report.num_steps * batch
            track.progress.note(samples, report.noise_scale, track.batch, submission.global_batch)
            if report.seconds_per_step > 0:
                track.observed[report.num_ranks, batch] = report.seconds_per_step
            if report.loss is not None:
                track.first_loss = track.first_loss or report.loss
                track.loss = report.loss
        elif not track.note and status.phase is JobPhase.RUNNING:
            track.note = "no report yet: its ranks stay as they are (a script without ElasticRun never reports)"
        if status.phase is not JobPhase.RUNNING or track.ordered is None:
            return
        ordered, track.ordered, track.steps_at_order = track.ordered, None, track.num_steps
        track.progress.fold()
        if len(ordered) == status.num_ranks and not status.refusal:
            track.batch = track.ordered_batch
        if len(ordered) == len(track.gpus) == status.num_ranks:  # the batch alone
            return
        if len(ordered) == status.num_ranks:
            track.gpus = ordered
            track.num_resizes += 1
            track.resize_s = status.resize_s
        track.changed_s = now
        track.progress.note_resize()

    def _end(self, name: str, end: End, reason: str = "") -> None:
        track = self._tracks.setdefault(name, _Track())
        done, noise_scale = track.progress.done_samples, track.progress.noise_scale
        measured = Measured(track.num_steps, track.loss, track.observed, done, noise_scale)
        self._ledger.ended(name, end, reason, measured)
        self._evict_all(name, track)

    def _recall(self, name: str, entry: Entry) -> None:
        """Shows and learns what an earlier scheduler measured of a job that ended."""
        found = entry.measured
        progress = Progress.ended(found.done_samples, found.noise_scale)
        observed = dict(found.observed)
        self._tracks[name] = _Track(num_steps=found.num_steps, loss=found.loss, observed=observed, progress=progress)
        if entry.end is End.FINISHED and found.observed:
            self._policy.finished(entry.submitted_s, self._state(entry.submitted_s, entry))

    def _evict_all(self, name: str, track: _Track) -> None:
        self._fleet.remove(name)
        track.left_s = track.seen_s if track.gpus else track.left_s
        track.gpus, track.ordered, track.status, track.has_reported = (), None, None, False
        track.progress.fold()

    def _order(self, now: float, grants: dict[str, Grant]) -> None:
        shrinks_first = sorted(self._open(), key=lambda item: len(grants[item[0]].gpus) if item[0] in grants else 0)
        for name, entry in shrinks_first:
            track, grant = self._tracks.setdefault(name, _Track()), grants.get(name)
            if not track.gpus and track.status is None:
                gpus = self._room(grant, track)
                if gpus and grant is not None:
                    self._start(now, track, entry.submission, gpus, grant.batch_size)
            elif not self._may_change(track):
                continue
            elif grant is None:
                track.ordered, track.ordered_batch = track.gpus, track.batch
                self._fleet.stop(name)
            elif (len(grant.gpus), grant.batch_size) != (len(track.gpus), track.batch):
                gpus = self._room(grant, track)
                if gpus:
                    track.ordered, track.ordered_batch = gpus, grant.batch_size
                    self._fleet.resize(name, len(gpus), grant.batch_size)

    def _start(self, now: float, track: _Track, submission: Submission, gpus: tuple[int, ...], batch: int) -> None:
        self._fleet.start(submission, len(gpus), batch)
        track.gpus, track.changed_s, track.batch = gpus, now, batch
        track.progress.note_resize()
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

    def _room(self, grant: Grant | None, track: _Track) -> tuple[int, ...]:
        """GPUs for the grant: the job's own, then free ones; empty if there are too few.

        Only the number counts, since Ray decides the location. So two jobs never wait for each other's GPUs.
        """
        count = len(grant.gpus) if grant is not None else 0
        kept = track.gpus[:count]
        gpus = tuple(sorted((*kept, *self._any_gpus(count - len(kept)))))
        return gpus if len(gpus) == count else ()

    def _any_gpus(self, count: int) -> tuple[int, ...]:
        taken = self._taken()
        return tuple([gpu for gpu in range(self.cluster.num_gpus) if gpu not in taken][:count])

    # Input of the policy.

    def _state(self, now: float, entry: Entry) -> JobState:
        submission = entry.submission
        track = self._tracks.setdefault(submission.name, _Track())
        progress = track.progress
        observed = self._observed(submission, track)
        return JobState(
            job=self._job(entry, track, observed),
            gpus=track.ordered or track.gpus,
            batch_size=(track.ordered_batch if track.ordered else track.batch) if track.gpus else 0,
            done_samples=progress.done_samples,
            seen_samples=progress.samples,
            gpu_s=track.gpu_s,
            run_s=track.run_s,
            num_resizes=track.num_resizes,
            samples_since_resize=progress.since_resize,
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
        nearest = submission.batches.nearest_multiple
        known = track.observed or {
            (size, nearest(submission.global_batch, size) or submission.global_batch): seconds
            for size, seconds in submission.planned
        }
        per_node = self.cluster.gpus_per_node
        return tuple(
            StepTime(num_gpus, math.ceil(num_gpus / per_node), batch, seconds)
            for (num_gpus, batch), seconds in known.items()
        )

    def _job(self, entry: Entry, track: _Track, observed: tuple[StepTime, ...]) -> Job:
        submission, sizes = entry.submission, entry.submission.sizes
        least, most = submission.min_gpus, submission.max_gpus
        batches = submission.feasible_batches
        if track.gpus and not self._may_change(track):
            held = len(track.ordered or track.gpus)
            sizes, least, most, batches = (held,), min(held, least), max(held, most), ()
        return Job(
            name=submission.name,
            arrival_s=entry.submitted_s,
            min_gpus=least,
            max_gpus=most,
            requested_gpus=submission.requested_gpus,
            gpu_batch=max(1, submission.global_batch // submission.requested_gpus),
            base_batch=submission.global_batch,
            max_batch=submission.batches.max,
            epoch_samples=submission.epoch_samples,
            throughput=fitted_throughput(observed, submission.global_batch),
            noise_scale=track.progress.noise_scale,
            resize_s=track.resize_s or track.start_s or _UNKNOWN_RESIZE_S,
            feasible_gpus=sizes,
            feasible_batches=batches,
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
            global_batch=track.batch,
            noise_scale=track.progress.noise_scale,
            num_steps=track.num_steps,
            seconds_per_step=track.observed.get((len(track.gpus), track.batch), 0.0),
            loss=track.loss or None,
            num_resizes=track.num_resizes,
            resize_s=track.resize_s,
            num_failures=entry.num_failures,
            note=note.strip().splitlines()[0] if note.strip() else "",
        )

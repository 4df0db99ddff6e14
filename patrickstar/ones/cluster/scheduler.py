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
from patrickstar.ones.cluster.progress import Progress
from patrickstar.ones.cluster.rows import Row, in_a_line
from patrickstar.ones.cluster.shares import decide_in_classes
from patrickstar.ones.cluster.submission import Submission
from patrickstar.ones.cluster.track import Track
from patrickstar.ones.jobs import Cluster, Job, JobState, StepTime
from patrickstar.ones.measurements import fitted_throughput
from patrickstar.ones.policies.protocol import Foresight, Grant, Policy
from patrickstar.ones.pools import Candidate, divide, has_stayed, relative_speeds, seconds_on, total

MOST_FAILURES = 3
"""Failures without a step between them after which a job is abandoned."""
_UNKNOWN_RESIZE_S = 10.0
_APPEARS_S = 30.0  # seconds after a job's start until its processes exist


class Scheduler:
    """Decides and orders; see the module's docstring. For one thread at a time.

    Args:
        ledger: records the jobs.
        fleet: runs them.
        policy: decides.
        pools: the cluster's GPUs by type, which is "" where it is unknown.
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
        pools: Mapping[str, Cluster],
        clock: Callable[[], float] = time.time,
        quotas: Mapping[str, int] | None = None,
    ):
        if policy.foresight is not Foresight.NONE:
            raise ValueError(
                f"{type(policy).__name__} needs to know how much work each job has left, which only a simulator "
                "knows; choose another policy"
            )
        self._pools = dict(pools)
        self._quotas = dict(quotas or {})
        self._ledger, self._fleet, self._policy, self._clock = ledger, fleet, policy, clock
        self._tracks: dict[str, Track] = {}
        for name, entry in ledger.entries.items():
            if entry.end is not None:  # an earlier scheduler may have died after its ledger entry and before this call
                fleet.remove(name)
                self._recall(name, entry)

    @property
    def cluster(self) -> Cluster:
        """All GPUs."""
        return total(self._pools)

    def submit(self, submission: Submission) -> None:
        """Accepts a job, which is recorded from now on.

        Raises:
            ValueError: the cluster can never run it, or its name is in use.
        """
        submission.check(self.cluster)
        least = submission.first_sizes[0]
        there = max((self._pools[kind].num_gpus for kind in self._kinds(submission)), default=0)
        if least > there:
            kind = f"type {submission.gpu_type}" if submission.gpu_type else "one type"
            raise ValueError(
                f"job {submission.name} needs at least {least} GPUs of {kind} and the cluster has {there}; lower its "
                "min_gpus, or leave the type out"
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
        submissions = {name: entry.submission for name, entry in self._open()}
        if any(self._holds_too_many(track) for track in self._tracks.values()):
            return  # GPUs that are gone are held still
        candidates = [self._candidate(now, entry) for _, entry in self._open()]
        division = divide(
            candidates, self._pools, lambda name, kind: self._state(now, self._ledger.entries[name], kind)
        )
        if division.leaving:  # the next tick decides on the others
            for name in division.leaving:
                self._stop(name)
            return
        if not any(division.states.values()):
            return  # no job fits; one that goes on with fewer ranks than its minimum is not stopped for nobody
        grants = {}
        for kind, pool in self._pools.items():
            states = division.states[kind]
            grants |= decide_in_classes(self._policy, now, states, submissions, pool, self._quotas)
        self._order(now, grants, division.pools)

    def see_cluster(self, pools: Mapping[str, Cluster]) -> None:
        """Takes notice of nodes that have come or gone. Jobs keep as many GPUs as they have, by new numbers."""
        if self._pools == pools:
            return
        self._pools = dict(pools)
        for kind in {track.kind for track in self._tracks.values()}:
            tracks = [track for track in self._tracks.values() if track.kind == kind]
            held = (sorted({*track.gpus, *(track.ordered or ())}) for track in tracks)
            numbers = {old: new for new, old in enumerate(itertools.chain.from_iterable(held))}
            for track in tracks:
                track.gpus = tuple(numbers[gpu] for gpu in track.gpus)
                track.ordered = None if track.ordered is None else tuple(numbers[gpu] for gpu in track.ordered)

    def _kinds(self, submission: Submission) -> list[str]:
        """Types of GPUs that a job may have."""
        return [kind for kind in self._pools if submission.gpu_type in ("", kind)]

    def _holds_too_many(self, track: Track) -> bool:
        pool = self._pools.get(track.kind)
        return max((*track.gpus, *(track.ordered or ())), default=-1) >= (pool.num_gpus if pool else 0)

    def _candidate(self, now: float, entry: Entry) -> Candidate:
        submission, track = entry.submission, self._tracks.setdefault(entry.submission.name, Track())
        return Candidate(
            name=submission.name,
            least_gpus=submission.first_sizes[0],
            gpus=self._policy.sizes.most(submission.requested_gpus, submission.max_gpus),
            speeds=relative_speeds(track.seconds, self._kinds(submission)),
            held=track.kind if track.gpus else None,
            waits=None if track.gpus else track.kind,
            may_leave=track.has_checkpoint and has_stayed(now - track.changed_s, track.start_s or _UNKNOWN_RESIZE_S),
        )

    def rows(self) -> list[Row]:
        """All jobs, in order of submission."""
        return [self._row(name, entry) for name, entry in self._ledger.entries.items()]

    # A tick.

    def _open(self) -> Iterator[tuple[str, Entry]]:
        return ((name, entry) for name, entry in self._ledger.entries.items() if entry.end is None)

    def _look_at(self, now: float, name: str, entry: Entry) -> None:
        track = self._tracks.setdefault(name, Track())
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
        if not track.gpus or track.has_other_ranks:  # this scheduler is new, the job is not; or a rank was lost
            track.gpus, track.kind = (), status.gpu_type
            track.gpus, track.changed_s = self._any_gpus(status.num_ranks, track.kind), now
            track.progress.note_resize()
        track.note_report(now, status, entry.submission)
        track.most_gpus = max(track.most_gpus, len(track.gpus))
        if status.phase is JobPhase.ENDED:
            self._policy.finished(now, self._state(now, entry, track.kind))
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

    def _end(self, name: str, end: End, reason: str = "") -> None:
        track = self._tracks.setdefault(name, Track())
        done, noise_scale = track.progress.done_samples, track.progress.noise_scale
        measured = Measured(track.num_steps, track.loss, dict(track.observed), done, noise_scale, track.num_parameters)
        self._ledger.ended(name, end, reason, measured)
        self._evict_all(name, track)

    def _recall(self, name: str, entry: Entry) -> None:
        """Shows and learns what an earlier scheduler measured of a job that ended."""
        found = entry.measured
        progress = Progress.ended(found.done_samples, found.noise_scale)
        seconds = {"": dict(found.observed)}
        self._tracks[name] = Track(
            num_steps=found.num_steps, loss=found.loss, seconds=seconds, progress=progress,
            num_parameters=found.num_parameters,
        )  # fmt: skip
        if entry.end is End.FINISHED and found.observed:
            self._policy.finished(entry.submitted_s, self._state(entry.submitted_s, entry, ""))

    def _evict_all(self, name: str, track: Track) -> None:
        self._fleet.remove(name)
        track.left_s = track.seen_s if track.gpus else track.left_s
        track.gpus, track.ordered, track.status, track.has_reported = (), None, None, False
        track.progress.note_batch_change()

    def _order(self, now: float, grants: dict[str, Grant], chosen: Mapping[str, str]) -> None:
        shrinks_first = sorted(self._open(), key=lambda item: len(grants[item[0]].gpus) if item[0] in grants else 0)
        for name, entry in shrinks_first:
            track, grant = self._tracks.setdefault(name, Track()), grants.get(name)
            if not track.gpus and track.status is None:
                track.kind = chosen.get(name, track.kind)
                gpus = self._room(grant, track, entry.submission)
                if gpus and grant is not None:
                    self._start(now, track, entry.submission, gpus, grant.batch_size)
            elif not track.may_change:
                continue
            elif grant is None:
                self._stop(name)
            elif (len(grant.gpus), grant.batch_size) != (len(track.gpus), track.batch):
                gpus = self._room(grant, track, entry.submission)
                if gpus:
                    track.ordered, track.ordered_batch = gpus, grant.batch_size
                    self._fleet.resize(name, len(gpus), grant.batch_size)

    def _stop(self, name: str) -> None:
        track = self._tracks[name]
        track.ordered, track.ordered_batch = track.gpus, track.batch
        self._fleet.stop(name)

    def _start(self, now: float, track: Track, submission: Submission, gpus: tuple[int, ...], batch: int) -> None:
        self._fleet.start(dataclasses.replace(submission, gpu_type=track.kind), len(gpus), batch)
        track.gpus, track.changed_s, track.batch = gpus, now, batch
        track.progress.note_resize()
        track.num_restarts += track.most_gpus > 0
        track.most_gpus = max(track.most_gpus, len(gpus))

    def _taken(self, kind: str) -> set[int]:
        tracks = (track for track in self._tracks.values() if track.kind == kind)
        return {gpu for track in tracks for gpu in (*track.gpus, *(track.ordered or ()))}

    def _room(self, grant: Grant | None, track: Track, submission: Submission) -> tuple[int, ...]:
        """GPUs for the grant: the job's own, then free ones; empty if there are too few.

        Only the number counts, since Ray decides the location. So two jobs never wait for each other's GPUs.
        """
        count = len(grant.gpus) if grant is not None else 0
        kept = track.gpus[:count]
        gpus = tuple(sorted((*kept, *self._any_gpus(count - len(kept), track.kind))))
        return gpus if len(gpus) == count and count <= self._quota_left(submission) else ()

    def _quota_left(self, submission: Submission) -> float:
        """GPUs that other jobs of its user leave it, also those that are leaving theirs."""
        others = (name for name, entry in self._open() if entry.submission.user == submission.user)
        tracks = (self._tracks[name] for name in others if name != submission.name and name in self._tracks)
        held = sum(len({*track.gpus, *(track.ordered or ())}) for track in tracks)
        return self._quotas.get(submission.user, math.inf) - held

    def _any_gpus(self, count: int, kind: str) -> tuple[int, ...]:
        taken, pool = self._taken(kind), self._pools.get(kind)
        return tuple([gpu for gpu in range(pool.num_gpus if pool else 0) if gpu not in taken][:count])

    # Input of the policy.

    def _state(self, now: float, entry: Entry, kind: str) -> JobState:
        submission = entry.submission
        track = self._tracks.setdefault(submission.name, Track())
        progress = track.progress
        pool = self._pools.get(kind, self.cluster)
        observed = self._observed(submission, track, kind, pool.gpus_per_node)
        return JobState(
            job=self._job(entry, track, observed, pool.num_gpus),
            gpus=track.ordered or track.gpus,
            batch_size=(track.ordered_batch if track.ordered else track.batch) if track.gpus else 0,
            done_samples=progress.done_samples,
            seen_samples=progress.samples,
            gpu_s=track.gpu_s,
            run_s=track.run_s,
            num_resizes=track.num_resizes + track.num_restarts,
            samples_since_resize=progress.since_resize,
            run_since_resize_s=track.trained_s(now),
            waited_s=0.0 if track.gpus else now - (track.left_s or entry.submitted_s),
            most_gpus=track.most_gpus,
            observed=observed,
            initial_loss=track.first_loss,
            loss=track.loss,
            accuracy=0.0,
        )

    def _observed(self, submission: Submission, track: Track, kind: str, per_node: int) -> tuple[StepTime, ...]:
        """Measured steps, of a type of GPUs; before any, the planner's predictions."""
        nearest = submission.batches.nearest_multiple
        known = seconds_on(track.seconds, kind, self._kinds(submission)) or {
            (size, nearest(submission.global_batch, size) or submission.global_batch): seconds
            for size, seconds in submission.planned
        }
        return tuple(
            StepTime(num_gpus, math.ceil(num_gpus / per_node), batch, seconds)
            for (num_gpus, batch), seconds in known.items()
        )

    def _job(self, entry: Entry, track: Track, observed: tuple[StepTime, ...], most_there: int) -> Job:
        submission, sizes = entry.submission, entry.submission.sizes
        least, most = submission.min_gpus, submission.max_gpus
        batches = submission.feasible_batches
        sizes = tuple(size for size in sizes if size <= most_there) or sizes[:1]
        if track.gpus and not track.may_change:
            batches = ()
        if track.gpus and (submission.inner_group > 1 or not track.may_change):
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
            max_batch=submission.batches.max,
            epoch_samples=submission.epoch_samples,
            throughput=fitted_throughput(observed, submission.global_batch),
            noise_scale=track.progress.noise_scale,
            resize_s=track.resize_s or track.start_s or _UNKNOWN_RESIZE_S,
            feasible_gpus=sizes,
            feasible_batches=batches,
            inner_group=submission.inner_group,
            num_parameters=track.num_parameters,
        )

    def _row(self, name: str, entry: Entry) -> Row:
        track = self._tracks.get(name, Track())
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
            gpu_type=track.kind if track.gpus else "",
            global_batch=track.batch,
            noise_scale=track.progress.noise_scale,
            num_steps=track.num_steps,
            seconds_per_step=track.observed.get((len(track.gpus), track.batch), 0.0),
            loss=track.loss or None,
            num_resizes=track.num_resizes,
            resize_s=track.resize_s,
            num_failures=entry.num_failures,
            note=in_a_line(note),
        )

"""The scheduler's measurements and orders of one job."""

from __future__ import annotations

import dataclasses

from patrickstar.ones.cluster.fleet import JobPhase, Status
from patrickstar.ones.cluster.progress import Progress
from patrickstar.ones.cluster.submission import Submission


@dataclasses.dataclass
class Track:
    """State of a job that has not ended, beside its ledger entry."""

    kind: str = ""
    """The type of these GPUs."""
    gpus: tuple[int, ...] = ()
    """GPUs that it holds, by the policy's numbers within their type; Ray decides their location."""
    ordered: tuple[int, ...] | None = None
    """GPUs that it will hold after the order in progress."""
    batch: int = 0
    """Its global batch; 0: not known yet."""
    ordered_batch: int = 0
    has_reported: bool = False
    """True if it has reported since its start."""
    status: Status | None = None
    seconds: dict[str, dict[tuple[int, int], float]] = dataclasses.field(default_factory=dict)
    """Seconds of a step by type of GPUs, and by number of ranks and global batch."""
    progress: Progress = dataclasses.field(default_factory=Progress)
    num_parameters: int = 0
    """Parameters of its model; 0: not reported yet."""
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
    num_restarts: int = 0
    most_gpus: int = 0
    """The most GPUs that it has held at a time."""
    first_loss: float = 0.0
    loss: float = 0.0
    resize_s: float = 0.0
    start_s: float = 0.0
    """Seconds from a start to the first report."""
    note: str = ""

    @property
    def observed(self) -> dict[tuple[int, int], float]:
        """Seconds of a step on the present type."""
        return self.seconds.setdefault(self.kind, {})

    @property
    def has_checkpoint(self) -> bool:
        """True if the job follows orders now, and keeps checkpoints."""
        return self.may_change and bool(self.status and self.status.report and self.status.report.checkpoint_steps)

    @property
    def may_change(self) -> bool:
        """True if the job follows orders now."""
        return (
            self.ordered is None
            and self.status is not None
            and self.status.phase is JobPhase.RUNNING
            and self.status.report is not None
            and not self.status.report.has_ended
        )

    @property
    def has_other_ranks(self) -> bool:
        """True if the job has carried out an order of an earlier scheduler, or goes on without a lost rank."""
        status = self.status
        return (
            self.ordered is None
            and status is not None
            and status.phase is JobPhase.RUNNING
            and status.num_ranks != len(self.gpus)
        )

    def trained_s(self, now: float) -> float:
        """Seconds since its GPUs last changed; 0 during the change."""
        return now - self.changed_s if self.has_reported and self.ordered in (None, self.gpus) else 0.0

    def note_report(self, now: float, status: Status, submission: Submission) -> None:
        """Takes a status, which may end the order in progress."""
        report = status.report
        self.note = status.refusal or (f"goes on without {status.num_lost} lost ranks" if status.num_lost else "")
        if report is not None:
            if not self.has_reported:
                self.has_reported, self.start_s, self.changed_s = True, now - self.changed_s, now
            self.num_steps = max(self.num_steps, report.num_steps)
            self.num_parameters = report.num_parameters or self.num_parameters
            first = submission.global_batch
            batch = first if submission.batches.is_fixed else report.global_batch or first
            is_news = self.ordered is None and report.num_steps > self.steps_at_order
            if batch != self.batch and (is_news or not self.batch):
                self.progress.note_batch_change()
                self.batch = batch
            samples = report.num_samples or report.num_steps * batch
            self.progress.note(samples, report.noise_scale, self.batch, submission.global_batch)
            if report.seconds_per_step > 0:
                self.observed[report.num_ranks, batch] = report.seconds_per_step
            if report.loss is not None:
                self.first_loss = self.first_loss or report.loss
                self.loss = report.loss
        elif not self.note and status.phase is JobPhase.RUNNING:
            self.note = "no report yet: its ranks stay as they are (a script without ElasticRun never reports)"
        if status.phase is not JobPhase.RUNNING or self.ordered is None:
            return
        ordered, self.ordered, self.steps_at_order = self.ordered, None, self.num_steps
        self.progress.note_batch_change()
        if len(ordered) == status.num_ranks and not status.refusal:
            self.batch = self.ordered_batch
        if len(ordered) == len(self.gpus) == status.num_ranks:  # the batch alone
            return
        if len(ordered) == status.num_ranks:
            self.gpus = ordered
            self.num_resizes += 1
            self.resize_s = status.resize_s
        self.changed_s = now
        self.progress.note_resize()

"""The results of ``benchmark.compare`` as a table and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from benchmark.common import gib, model_flops, table
from benchmark.systems.run import Run

_REFERENCE = "patrickstar"
_COLUMNS = (
    ("system", -24, ""), ("ranks", 6, ""), ("GPU limit", 11, ""), ("step s", 9, ".3f"), ("TFLOPS", 8, ".1f"),
    ("tokens/s", 10, ".0f"), ("ratio", 7, ".2f"), ("scaling", 9, ".3f"), ("device GiB", 12, ".3g"),
    ("host GiB", 10, ".3g"), ("exposed s", 11, ".3f"), ("coll. s", 9, ".3f"), ("up GiB", 8, ".3g"),
    ("down GiB", 10, ".3g"), ("init s", 8, ".1f"),
)  # fmt: skip


_COMMON = ("model", "length", "batch", "clipping", "host_bytes", "warmup", "steps", "compiled", "recomputed")


@dataclasses.dataclass
class Comparison:
    """Runs of one model by several systems, on one or several numbers of ranks."""

    command: str
    runs: list[Run] = dataclasses.field(default_factory=list)

    def step_seconds(self, run: Run) -> float:
        """Median of the timed steps."""
        return statistics.median(run.step_seconds[run.job.warmup :])

    def ratio(self, run: Run) -> float | None:
        """Step time over PatrickStar's on as many ranks; None if one of the two did not train."""
        reference = self._measured(_REFERENCE, run.job.ranks)
        if reference is None or not run.is_measured:
            return None
        return self.step_seconds(run) / self.step_seconds(reference)

    def scaling(self, run: Run) -> float | None:
        """TFLOPS per GPU over the same system's on the least number of ranks.

        None if one of the two did not train, or there is only one number of ranks.
        """
        all_ranks = {other.job.ranks for other in self.runs}
        least = self._measured(run.job.system, min(all_ranks))
        if len(all_ranks) == 1 or least is None or not run.is_measured:
            return None
        return self.tflops_per_gpu(run) / self.tflops_per_gpu(least)

    def _measured(self, system: str, ranks: int) -> Run | None:
        found = (run for run in self.runs if (run.job.system, run.job.ranks) == (system, ranks) and run.is_measured)
        return next(found, None)

    def tflops_per_gpu(self, run: Run) -> float:
        return model_flops(run.job.shape, run.job.batch) / self.step_seconds(run) / 1e12

    def tokens_per_second_per_gpu(self, run: Run) -> float:
        return run.job.batch * run.job.length / self.step_seconds(run)

    def exposed_seconds(self, run: Run) -> float | None:
        """Seconds of a step in which no kernel but collectives runs; None if not measured."""
        if run.activity is None:
            return None
        return max(0.0, self.step_seconds(run) - run.activity["computing_seconds"])

    def to_dict(self) -> dict[str, Any]:
        job = dataclasses.asdict(self.runs[0].job)
        common = {key: job[key] for key in _COMMON}
        provenance = next((run.provenance for run in self.runs if run.provenance), {})
        shape = self.runs[0].job.shape
        return {
            "case": "compare",
            **common,
            "num_parameters": shape.num_parameters(),
            "systems": [self._system(run) for run in self.runs],
            **{**provenance, "command": self.command},
        }

    def _system(self, run: Run) -> dict[str, Any]:
        values: dict[str, Any] = {
            "system": run.job.system, "ranks": run.job.ranks, "outcome": run.outcome.value, "reason": run.reason,
            "version": run.version, "gpu_limit_bytes": run.job.gpu_bytes,
        }  # fmt: skip
        if run.is_measured:
            values |= {
                "step_seconds": self.step_seconds(run), "model_tflops_per_gpu": self.tflops_per_gpu(run),
                "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu(run),
                "step_seconds_over_patrickstar": self.ratio(run), "scaling": self.scaling(run),
                "exposed_seconds": self.exposed_seconds(run), "gpu_activity": run.activity,
                "gpu_activity_missing_because": run.activity_reason,
            }  # fmt: skip
        return values | {
            "device_peak_bytes": run.device_peak_bytes,
            "host_peak_bytes": run.host_peak_bytes,
            "init_seconds": run.init_seconds,
            "all_step_seconds": [round(seconds, 4) for seconds in run.step_seconds],
            "slowest_rank_step_seconds": [round(seconds, 4) for seconds in run.slowest_step_seconds],
            "losses": run.losses,
            "grad_norms": run.grad_norms,
            "num_clipped_steps": run.num_clipped_steps,
            "settings": run.settings,
            "report": run.report,
            "log_tail": run.log_tail,
        }


def format_table(comparison: Comparison) -> str:
    """A line per run, then the losses of each run."""
    job = comparison.runs[0].job
    provenance = next((run.provenance for run in comparison.runs if run.provenance), {})
    compiled = {"no": "", "blocks": ", blocks compiled", "whole": ", compiled as a whole"}[job.compiled]
    clipping = f"clipping at {job.clipping:g}" if job.clipping > 0 else "no clipping"
    lines = [
        f"{job.model}: {job.shape.num_parameters() / 1e9:.3g} B parameters, "
        f"batch {job.batch} x {job.length} per rank, bf16, AdamW, {clipping}{compiled}",
        f"GPU {provenance.get('gpu', 'unknown')}, PyTorch {provenance.get('torch_version', 'unknown')}",
        "TFLOPS, tokens/s and device memory are per GPU, host memory is of all ranks",
        "",
    ]
    titles, *rows = table(_COLUMNS, (_cells(comparison, run) for run in comparison.runs))
    reasons = ("" if run.is_measured else f"  {run.outcome.value}: {run.reason}" for run in comparison.runs)
    lines += [titles, *(row + reason for row, reason in zip(rows, reasons, strict=True))]
    lines += ["", "losses, from the first step on:"]
    lines += [
        f"{_name(run)}  " + " ".join(f"{loss:.4f}" for loss in run.losses) for run in comparison.runs if run.losses
    ]
    lines += [
        f"{_name(run)}  clipping acted in {run.num_clipped_steps} of {job.steps} timed steps"
        for run in comparison.runs
        if run.num_clipped_steps is not None
    ]
    lines += [
        f"{_name(run)}  exposed time was not measured: {run.activity_reason}"
        for run in comparison.runs
        if run.is_measured and run.activity is None
    ]
    return "\n".join(lines)


def _cells(comparison: Comparison, run: Run) -> list[Any]:
    limit = "all" if run.job.gpu_bytes is None else f"{gib(run.job.gpu_bytes):.3g}"
    cells: list[Any] = [run.job.system, run.job.ranks, limit]
    if not run.is_measured:
        return cells + [None] * (len(_COLUMNS) - len(cells))
    activity = run.activity or {}
    figures = (comparison.step_seconds, comparison.tflops_per_gpu, comparison.tokens_per_second_per_gpu)
    return [
        *cells, *(figure(run) for figure in figures), comparison.ratio(run), comparison.scaling(run),
        gib(run.device_peak_bytes), gib(run.host_peak_bytes), comparison.exposed_seconds(run),
        activity.get("collectives_only_seconds"), gib(activity.get("uploaded_bytes")),
        gib(activity.get("downloaded_bytes")), run.init_seconds,
    ]  # fmt: skip


def _name(run: Run) -> str:
    return f"{run.job.system:<24}{run.job.ranks:>6}"

"""Published ONES beside its rivals on its artifact's mix, with one assumption more at a time.

    python -m benchmark.ones_published --seeds 5

Each line keeps the assumptions of the lines before. Simulated time: no GPU, one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence

import numpy as np

from patrickstar.ones import Cluster, Policy, TraceJob, figures, make_policy, make_trace, simulate
from patrickstar.ones.earlier_jobs import HISTORY_SEED, measured_history
from patrickstar.ones.mixes import GPUS_PER_NODE
from patrickstar.ones.policies.ones_published import OnesPublished, StartSize
from patrickstar.ones.policies.progress import ProgressModel
from patrickstar.ones.report import mean_and_interval
from patrickstar.ones.traces import Curve

CLUSTER = Cluster(64)
RIVALS = ("tiresias", "optimus", "fifo")
_Change = Callable[[TraceJob], TraceJob]


def epochs_of(item: TraceJob, mean: float) -> TraceJob:
    """So many epochs per job, within a factor of 1.6, and a curve by progress: jobs end when they have converged."""
    draw = np.random.default_rng((item.noise_seed, 7)).standard_normal()
    job = dataclasses.replace(item.job, epoch_samples=item.samples / max(4.0, mean * math.exp(0.5 * draw)))
    return dataclasses.replace(item, job=job, curve=Curve.EXPONENTIAL, curve_samples=item.samples / 3)


def _with_job(item: TraceJob, **changes: object) -> TraceJob:
    """The job with these changes and the same length on its requested GPUs."""
    job = dataclasses.replace(item.job, **changes)
    scale = job.reference_goodput(GPUS_PER_NODE) / item.job.reference_goodput(GPUS_PER_NODE)
    return dataclasses.replace(item, job=job, samples=item.samples * scale)


def without_efficiency_loss(item: TraceJob) -> TraceJob:
    """A sample of a large batch is worth as much as one of a small batch."""
    return _with_job(item, noise_scale=1e9)


def with_linear_scaling(item: TraceJob) -> TraceJob:
    """Synchronisation takes no time, and the batch may grow with the GPUs."""
    speed = dataclasses.replace(
        item.job.throughput, sync_s=0.0, sync_growth_s=0.0, node_sync_s=0.0, node_sync_growth_s=0.0,
        max_micro_batch=2**30,
    )  # fmt: skip
    return _with_job(item, throughput=speed, max_batch=64 * item.job.gpu_batch)


@dataclasses.dataclass(frozen=True)
class Case:
    """A set of assumptions."""

    says: str
    changes: tuple[_Change, ...] = ()
    """Applied to each job, before its epochs."""
    epochs: float = 0.0
    """Epochs per job; 0: as in the mix, independent of the length."""
    start: StartSize = StartSize.SMALLEST
    resize_s: float = 5.0
    """ONES pays it; rivals pay 5 s."""

    def trace(self, seed: int, resize_s: float, num_jobs: int | None = None) -> tuple[TraceJob, ...]:
        """The artifact's mix under these assumptions."""
        found = []
        for item in make_trace("artifact", seed, num_jobs, resize_s=resize_s):
            for change in self.changes:
                item = change(item)
            found.append(epochs_of(item, self.epochs) if self.epochs else item)
        return tuple(found)

    def published(self, seed: int) -> Policy:
        """ONES, with 20 earlier jobs under the same assumptions."""
        past = measured_history(self.trace(seed + HISTORY_SEED, self.resize_s, 20), CLUSTER)
        return OnesPublished(ProgressModel(seed, past), seed, self.start)


_IDEAL = (without_efficiency_loss, with_linear_scaling)
CASES = (
    Case("the mix as it is"),
    Case("25 epochs per job, as in the artifact's history; losses tell progress", (), 25.0),
    Case("+ no loss of statistical efficiency", _IDEAL[:1], 25.0),
    Case("+ linear scaling", _IDEAL, 25.0),
    Case("+ start on the requested GPUs", _IDEAL, 25.0, StartSize.REQUESTED),
    Case("+ a resize of ONES costs 1 s", _IDEAL, 25.0, StartSize.REQUESTED, 1.0),
    Case("+ 200 epochs per job", _IDEAL, 200.0, StartSize.REQUESTED, 1.0),
    Case("+ 1000 epochs per job", _IDEAL, 1000.0, StartSize.REQUESTED, 1.0),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args(arguments).seeds)
    print(f"mean JCT in s, {len(seeds)} seeds\n{'':<72}{'ones-published':>18}" + "".join(f"{n:>18}" for n in RIVALS))
    for case in CASES:
        runs = {"ones-published": [(case.trace(seed, case.resize_s), case.published(seed)) for seed in seeds]}
        for name in RIVALS:
            runs[name] = [(case.trace(seed, 5.0), make_policy(name, seed)) for seed in seeds]
        line = f"{case.says:<72}"
        for pairs in runs.values():
            mean, half = mean_and_interval([figures(simulate(*pair, CLUSTER)).mean_jct_s for pair in pairs])
            line += f"{mean:.0f} ±{half:.0f}".rjust(18)
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

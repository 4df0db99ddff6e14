"""Published ONES beside its rivals on its artifact's mix, under other assumptions.

    python -m benchmark.ones_published --assumptions alone --seeds 20
    python -m benchmark.ones_published --assumptions together --seeds 5

``alone`` changes one assumption in each line; with ``together`` each line keeps those of the lines before. The second
column is ONES' mean JCT over that of the first line, seed by seed. Simulated time: no GPU, one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence

import numpy as np

from patrickstar.ones import Cluster, Policy, TraceJob, figures, make_policy, make_trace, simulate
from patrickstar.ones.earlier_jobs import HISTORY_SEED, measured_history
from patrickstar.ones.mixes import GPUS_PER_NODE
from patrickstar.ones.policies.ones_published import OnesPublished, Prediction, Rules, StartSize
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
    rules: Rules = Rules()
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
        return OnesPublished(ProgressModel(seed, past), seed, self.rules)


_IDEAL = (without_efficiency_loss, with_linear_scaling)
_REQUESTED = Rules(start=StartSize.REQUESTED)
_REQUESTED_TRUTH = Rules(start=StartSize.REQUESTED, prediction=Prediction.EXACT)
_TOGETHER = (
    Case("the mix as it is"),
    Case("25 epochs per job, as in the artifact's history; losses tell progress", (), 25.0),
    Case("+ no loss of statistical efficiency", _IDEAL[:1], 25.0),
    Case("+ linear scaling", _IDEAL, 25.0),
    Case("+ start on the requested GPUs", _IDEAL, 25.0, _REQUESTED),
    Case("+ a resize of ONES costs 1 s", _IDEAL, 25.0, _REQUESTED, 1.0),
    Case("+ 200 epochs per job", _IDEAL, 200.0, _REQUESTED, 1.0),
    Case("+ 1000 epochs per job", _IDEAL, 1000.0, _REQUESTED, 1.0),
    Case("25 epochs again, + prediction: the truth", _IDEAL, 25.0, _REQUESTED_TRUTH, 1.0),
)
_ALONE = (
    Case("the artifact's rules, the mix as it is, 5 s per resize"),
    Case("start: the requested GPUs, not one", rules=_REQUESTED),
    Case("growth: at once to the most", rules=Rules(growth=64.0)),
    Case("growth: without waiting for an epoch", rules=Rules(growth_epochs=0.0)),
    Case("growth: after two epochs, not one", rules=Rules(growth_epochs=2.0)),
    Case("scale-down: never, nor after a stop", rules=Rules(scale_down_from=2.0, stop_divisor=1)),
    Case("scale-down: from an eighth of the cluster, not half", rules=Rules(scale_down_from=0.125)),
    Case("cool-down: none, not one epoch", rules=Rules(cooldown_epochs=0.0)),
    Case("cool-down: four epochs", rules=Rules(cooldown_epochs=4.0)),
    Case("resize: 1 s, not 5", resize_s=1.0),
    Case("prediction: the truth", rules=Rules(prediction=Prediction.EXACT)),
    Case("epochs: 25 per job, and losses tell progress", epochs=25.0),
)
ASSUMPTIONS = {"alone": _ALONE, "together": _TOGETHER}


def published_jct_s(case: Case, seed: int) -> float:
    """Mean JCT of published ONES."""
    return figures(simulate(case.trace(seed, case.resize_s), case.published(seed), CLUSTER)).mean_jct_s


@functools.lru_cache(maxsize=2**12)
def rival_jct_s(name: str, case: Case, seed: int) -> float:
    """Mean JCT of a rival, which pays 5 s per resize."""
    return figures(simulate(case.trace(seed, 5.0), make_policy(name, seed), CLUSTER)).mean_jct_s


def line(case: Case, seeds: Sequence[int], found: Sequence[float], first: Sequence[float]) -> str:
    """A line of the table; ``found`` and ``first`` are ONES' mean JCTs in seconds here and in the first line."""
    ratio, half = mean_and_interval(list(np.divide(found, first)))
    text = f"{case.says:<72}{_shown(found)}" + f"{ratio:.2f} ±{half:.2f}".rjust(16)
    plain = Case("", case.changes, case.epochs)
    return text + "".join(_shown([rival_jct_s(name, plain, seed) for seed in seeds]) for name in RIVALS)


def _shown(values: Sequence[float]) -> str:
    mean, half = mean_and_interval(list(values))
    return f"{mean:.0f} ±{half:.0f}".rjust(16)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assumptions", choices=ASSUMPTIONS, default="together")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args(arguments)
    seeds = range(given.seeds)
    heads = "".join(f"{name:>16}" for name in ("ones-published", "/ first line", *RIVALS))
    print(f"mean JCT in s, {len(seeds)} seeds\n{'':<72}{heads}")
    first: list[float] = []
    for case in ASSUMPTIONS[given.assumptions]:
        found = [published_jct_s(case, seed) for seed in seeds]
        first = first or found
        print(line(case, seeds, found, first), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

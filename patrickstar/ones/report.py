"""Figures of simulations with confidence intervals over seeds, and pictures of them (matplotlib, imported lazily)."""

from __future__ import annotations

import colorsys
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patrickstar.ones.simulator import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Student's t for a two-sided interval of 95 % with 1 to 30 degrees of freedom; beyond, the normal distribution's.
_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_T_NORMAL = 1.960


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of one simulation; times in seconds."""

    mean_jct_s: float
    """Mean time from a job's arrival to its end."""
    median_jct_s: float
    """Median time from a job's arrival to its end."""
    p99_jct_s: float
    """The 99th percentile of these times, interpolated linearly."""
    makespan_s: float
    """From the first arrival to the last end."""
    utilisation: float
    """GPU-seconds held by jobs, resizes included, over all GPU-seconds of the makespan."""
    stalled: float
    """Share of the held GPU-seconds in which a resize was in progress."""
    resizes_per_job: float
    """Resizes and restarts, per job."""
    longest_wait_s: float
    """The longest time that a job was without GPUs, from its arrival or a stop to its next start."""


def figures(result: Result) -> Figures:
    """The figures of one simulation.

    Raises:
        ValueError: it had no jobs.
    """
    if not result.jobs:
        raise ValueError("a simulation without jobs has no figures; give a trace with at least one job")
    times = np.array([job.jct_s for job in result.jobs])
    makespan = max(job.end_s for job in result.jobs) - min(job.arrival_s for job in result.jobs)
    held = sum((part.end_s - part.start_s) * len(part.gpus) for part in result.segments)
    stalled = sum(part.stalled_s * len(part.gpus) for part in result.segments)
    return Figures(
        mean_jct_s=float(times.mean()),
        median_jct_s=float(np.median(times)),
        p99_jct_s=float(np.percentile(times, 99)),
        makespan_s=makespan,
        utilisation=held / (makespan * result.cluster.num_gpus),
        stalled=stalled / held,
        resizes_per_job=sum(job.num_resizes for job in result.jobs) / len(result.jobs),
        longest_wait_s=max(job.longest_wait_s for job in result.jobs),
    )


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % confidence interval by Student's t (nan for a single value).

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values have no mean; give at least one")
    mean = float(np.mean(values))
    if len(values) == 1:
        return mean, math.nan
    degrees = len(values) - 1
    t = _T_95[degrees - 1] if degrees <= len(_T_95) else _T_NORMAL
    return mean, t * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def table(results: Mapping[str, Sequence[Result]], compare_to: str | None = None) -> str:
    """A line for each policy: means over seeds, each with its half interval, and the longest wait of all.

    ``compare_to`` names the reference policy of the last column: the mean over seeds of the ratio of mean JCTs, seed by
    seed.
    """
    found = {name: [figures(result) for result in runs] for name, runs in results.items()}
    head = f"{'policy':<15} {'mean JCT s':>15} {'median s':>13} {'p99 s':>13} {'makespan s':>13} {'GPUs held':>11}"
    head += f" {'stalled':>8} {'resizes':>8} {'wait s':>7}"
    lines = [head + (f"  {'x ' + compare_to:>16}" if compare_to else "")]
    for name, runs in found.items():
        line = f"{name:<15}"
        for key, width, decimals in (
            ("mean_jct_s", 15, 1), ("median_jct_s", 13, 0), ("p99_jct_s", 13, 0), ("makespan_s", 13, 0),
        ):  # fmt: skip
            line += " " + _shown([getattr(run, key) for run in runs], decimals).rjust(width)
        for key, width in (("utilisation", 11), ("stalled", 8)):
            line += f" {100 * np.mean([getattr(run, key) for run in runs]):.1f} %".rjust(width + 1)
        line += f"{np.mean([run.resizes_per_job for run in runs]):.1f}".rjust(9)
        line += f"{max(run.longest_wait_s for run in runs):.0f}".rjust(8)
        if compare_to:
            ratios = [a.mean_jct_s / b.mean_jct_s for a, b in zip(runs, found[compare_to], strict=True)]
            line += "  " + _shown(ratios, 3).rjust(16)
        lines.append(line)
    return "\n".join(lines)


def _shown(values: Sequence[float], decimals: int) -> str:
    mean, half = mean_and_interval(values)
    return f"{mean:.{decimals}f}" + ("" if math.isnan(half) else f" ±{half:.{decimals}f}")


def draw_jcts(results: Mapping[str, Sequence[Result]], path: str | Path) -> None:
    """Writes a picture (PNG by its name): the fraction of jobs that end within a time, one curve per policy.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure, axes = _new_figure(8, 5)
    for name, runs in results.items():
        times = np.sort([job.jct_s for result in runs for job in result.jobs])
        axes.step(times, np.arange(1, len(times) + 1) / len(times), where="post", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("seconds from arrival to end")
    axes.set_ylabel("part of the jobs")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_gantt(result: Result, path: str | Path, title: str = "") -> None:
    """Writes a picture of one schedule: GPUs upwards, time to the right, a colour for each job, resizes in black.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure, axes = _new_figure(12, 6)
    names = [job.job for job in result.jobs]
    colours = {name: _colour(index) for index, name in enumerate(names)}
    sizes = [pool.num_gpus for pool in result.pools.values()]
    below = dict(zip(result.pools, itertools.accumulate(sizes, initial=0), strict=False))
    for part in result.segments:
        for first, count in _ranges(tuple(below[part.gpu_type] + gpu for gpu in part.gpus)):
            size = (part.end_s - part.start_s, part.stalled_s)
            axes.broken_barh([(part.start_s, size[0])], (first, count), color=colours[part.job], linewidth=0)
            if size[1]:
                axes.broken_barh([(part.start_s, size[1])], (first, count), color="black", linewidth=0)
    axes.set_xlim(0, max(job.end_s for job in result.jobs))
    axes.set_ylim(0, result.cluster.num_gpus)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GPU")
    axes.set_title(title)
    figure.savefig(path, dpi=120)


def _ranges(gpus: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive GPUs."""
    found: list[tuple[int, int]] = []
    for gpu in gpus:
        if found and sum(found[-1]) == gpu:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((gpu, 1))
    return found


def _colour(index: int) -> tuple[float, float, float]:
    return colorsys.hsv_to_rgb((index * 0.618034) % 1.0, 0.55 + 0.3 * (index % 2), 0.9)


def _new_figure(width: float, height: float) -> tuple[Figure, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{error}; pictures need matplotlib: in a clone, pip install '.[ones]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()

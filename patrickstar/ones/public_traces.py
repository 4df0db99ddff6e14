"""Public traces of clusters: arrivals, GPUs and lengths from their columns; models are drawn, since they have none.

Formats are those of the published files:

* Philly (Microsoft, ATC 2019): ``cluster_job_log``, a JSON list of jobs with ``attempts``.
* Helios (SenseTime, SC 2021): ``cluster_log.csv`` with ``gpu_num``, ``state``, ``submit_time``, ``duration``.
* PAI (Alibaba, NSDI 2022): ``pai_task_table.csv``, which has no header; ``plan_gpu`` is in hundredths.
"""

from __future__ import annotations

import csv
import datetime
import enum
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from patrickstar.ones.mixes import draw_job
from patrickstar.ones.traces import TraceJob

_PAI_COLUMNS = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu",
    "gpu_type",
)  # fmt: skip
_Row = tuple[float, int, float]
"""Submission in seconds, GPUs, seconds of running."""


class PublicFormat(enum.Enum):
    """Columns of public traces."""

    PHILLY = "philly"
    HELIOS = "helios"
    PAI = "pai"


def read_public_trace(
    path: str | Path, kind: PublicFormat, seed: int = 0, num_jobs: int | None = None, resize_s: float = 5.0
) -> tuple[TraceJob, ...]:
    """The first ``num_jobs`` jobs by submission, which starts at 0.

    Jobs that did not use a GPU or never ran are left out. Failed and killed jobs count: they took GPUs too. PAI has
    starts in place of submissions.

    Raises:
        ValueError: a record lacks a column or has a wrong value (the message has its number), or no job is left.
        OSError: the file cannot be read.
    """
    readers = {PublicFormat.PHILLY: _philly, PublicFormat.HELIOS: _helios, PublicFormat.PAI: _pai}
    rows: list[_Row] = []
    records = readers[kind](Path(path))
    number = 0
    while True:
        number += 1
        try:
            row = next(records)
        except StopIteration:
            break
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"{path}: record {number} is none of {kind.value}'s: {error!r}") from None
        if row[1] >= 1 and row[2] > 0:
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no job that ran on a GPU; give another file or --format")
    rows.sort()
    rng = np.random.default_rng((seed, 10**5))
    return tuple(
        draw_job(rng, index, submitted_s - rows[0][0], gpus, length_s, resize_s)
        for index, (submitted_s, gpus, length_s) in enumerate(rows[:num_jobs])
    )


def _philly(path: Path) -> Iterator[_Row]:
    for job in json.loads(path.read_text(encoding="utf-8")):
        seconds, gpus = 0.0, 0
        for attempt in job["attempts"]:
            if attempt["start_time"] and attempt["end_time"]:
                seconds += _seconds(attempt["end_time"]) - _seconds(attempt["start_time"])
            gpus = max(gpus, sum(len(node["gpus"]) for node in attempt["detail"]))
        yield _seconds(job["submitted_time"]), gpus, seconds


def _helios(path: Path) -> Iterator[_Row]:
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield _seconds(row["submit_time"]), int(row["gpu_num"]), float(row["duration"])


def _pai(path: Path) -> Iterator[_Row]:
    with path.open(encoding="utf-8", newline="") as file:
        for fields in csv.reader(file):
            row = dict(zip(_PAI_COLUMNS, fields, strict=True))
            if not row["start_time"] or not row["end_time"] or not row["plan_gpu"]:
                yield 0.0, 0, 0.0
                continue
            start_s, end_s = float(row["start_time"]), float(row["end_time"])
            yield start_s, math.ceil(float(row["plan_gpu"]) / 100 * float(row["inst_num"])), end_s - start_s


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.timezone.utc).timestamp()

"""Samples and losses of each step, as jobs' processes write them down."""

import dataclasses
import json
import os
import time


class Notes:
    """One process's file in the job's folder."""

    def __init__(self, folder):
        self._file = (folder / f"seen-{os.getpid()}").open("a")
        self._start = os.environ.get("PATRICKSTAR_ELASTIC", "alone")  # differs each time that the job is started

    def add(self, step, num_lost, loss, samples):
        line = {"step": step, "start": self._start, "num_lost": num_lost, "time": time.time()}
        self._file.write(json.dumps({**line, "loss": loss, "samples": samples}) + "\n")
        self._file.flush()


@dataclasses.dataclass
class Step:
    samples: list
    losses: list
    """One for each micro-batch."""


def _lines(folder):
    return [json.loads(line) for path in folder.glob("seen-*") for line in path.read_text().splitlines()]


def num_recoveries(folder):
    """Times that ranks went on without a lost one."""
    times = {(line["start"], line["num_lost"]) for line in _lines(folder)}
    return len(times) - len({start for start, _ in times})


def steps_of(folder):
    """Steps by number; the last time counts of one that was repeated."""
    lines = _lines(folder)
    starts = {}
    for line in lines:
        starts[line["start"]] = min(starts.get(line["start"], float("inf")), line["time"])
    found = {}
    for line in lines:
        times = found.setdefault(line["step"], {})
        step = times.setdefault((starts[line["start"]], line["num_lost"]), Step([], []))
        step.samples += line["samples"]
        step.losses.append(line["loss"])
    return {step: times[max(times)] for step, times in found.items()}

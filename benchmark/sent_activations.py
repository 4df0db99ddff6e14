"""Steps whose checkpointed calls send activations to the host, by the simulator: what a choice with that level would
gain. No engine chooses it.

    python -m benchmark.sent_activations [CASE ...]

A call sends its products, or all that it saves, after its forward. They return two calls before their use. The host's
memory and its bandwidth are taken to suffice.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from unittest import mock

from patrickstar.activations.activation_rules import Saved
from patrickstar.planning import prediction
from patrickstar.planning.machines import MACHINES
from patrickstar.planning.planner import Planner
from patrickstar.planning.prediction import Predictor
from patrickstar.planning.question import Question, Workload
from patrickstar.planning.recomputation import step_with_saved
from patrickstar.planning.setting import DoesNotFitError, Setting
from patrickstar.planning.timeline import TimedTimeline

GIB = 2**30
PARTS = 8
"""Tried numbers of calls that send: this many, evenly spread among all."""
FRAGMENTS = 1.1
"""See ``_FRAGMENTS`` in patrickstar/planning/recomputation.py."""


@dataclasses.dataclass(frozen=True)
class Asked:
    machine: str
    model: str
    batch: int
    length: int
    device_gib: int
    host_gib: int
    precision: str = "bf16"


CASES = {
    "4.3b": Asked("h200", "gpt:3072x36", 16, 1024, 24, 240),
    "llama-8b-40gib": Asked("h200", "llama-3.1-8b", 4, 4096, 40, 240),
    "llama-8b-4090": Asked("rtx4090", "llama-3.1-8b", 2, 4096, 24, 200),
    "llama-8b-l4": Asked("l4", "llama-3.1-8b", 2, 4096, 23, 200),
    "llama-3b-4060ti": Asked("rtx4060ti", "llama-3.2-3b", 2, 4096, 16, 128),
    "llama-1b-3060": Asked("rtx3060", "llama-3.2-1b", 1, 4096, 11, 64),
    "llama-1b-t4": Asked("t4", "llama-3.2-1b", 2, 4096, 15, 48, "fp16"),
}


class Sending:
    """Stands for ``step_with_saved``: calls with ``ON_HOST`` send what ``level`` saves."""

    def __init__(self, level: Saved):
        self._level = level

    def __call__(self, timed: TimedTimeline, saved: tuple[Saved, ...]) -> TimedTimeline:
        accesses = [dict(access) for access in timed.accesses]
        copies = [dataclasses.replace(copied) for copied in timed.copies]
        for call in timed.calls:
            if call.number >= len(saved) or saved[call.number] is not Saved.ON_HOST:
                continue
            keeps_products = self._level is Saved.PRODUCTS
            num_bytes = call.product_bytes if keeps_products else call.saved_bytes
            back = max(call.forward_end + 1, call.recompute_begin - 2 * (call.recompute_end - call.recompute_begin))
            copies[call.forward_end].leaving += num_bytes
            copies[back].coming += num_bytes
            copies[call.recompute_begin + keeps_products].needed += num_bytes
            for index in range(call.forward_end + 2, back):
                accesses[index]["activation_peak_bytes"] -= int(FRAGMENTS * num_bytes)
        there = dataclasses.replace(timed, accesses=accesses, copies=copies)
        return step_with_saved(there, [self._level if kept is Saved.ON_HOST else kept for kept in saved])


def sent_steps(predictor: Predictor, setting: Setting, chosen: tuple[Saved, ...]) -> Iterator[tuple[int, float | None]]:
    """Numbers of calls that send, and the step if the others recompute or save as ``chosen``; None: does not fit."""
    count = len(chosen)
    for num in sorted({round(count * part / PARTS) for part in range(1, PARTS + 1)}):
        sending = {round(index * count / num) for index in range(num)}
        steps = []
        for others in {(Saved.NOTHING,) * count, chosen}:
            saved = tuple(Saved.ON_HOST if index in sending else others[index] for index in range(count))
            try:
                steps.append(predictor.predict(setting, saved).step.seconds)
            except DoesNotFitError:
                continue
        yield num, min(steps, default=None)


def show(name: str, asked: Asked) -> None:
    workload = Workload(
        model=asked.model, batch=asked.batch, length=asked.length, checkpointing=True, precision=asked.precision
    )
    setting = Setting(device_bytes=asked.device_gib * GIB, host_bytes=asked.host_gib * GIB)
    question = Question(workload=workload, machine=MACHINES[asked.machine], setting=setting)
    planner = Planner()
    answer = planner.answer(question)
    trace, case = planner._trace(question), answer.chosen
    call, step = trace.uses.calls[0], case.step
    print(
        f"{name}: {asked.model}, {asked.batch} x {asked.length}, {asked.machine} within {asked.device_gib} GiB, host "
        f"{asked.host_gib} GiB with {(setting.host_bytes - case.host_bytes) / 1e9:.0f} GB free\n"
        f"  chosen {step.seconds:.3f} s, all recomputed {(answer.all_recomputed or step).seconds:.3f} s; compute "
        f"{step.compute_seconds:.3f} s, uploads {step.upload_seconds:.3f}, downloads {step.download_seconds:.3f}, host "
        f"updates {step.host_adam_seconds:.3f}\n"
        f"  a call: products {call.product_bytes / 1e9:.2f} GB in {call.product_seconds * 1e3:.1f} ms, all "
        f"{call.saved_bytes / 1e9:.2f} GB in {call.recompute_seconds * 1e3:.1f} ms; link "
        f"{question.machine.upload_gbps:.0f} GB/s"
    )
    for level in (Saved.PRODUCTS, Saved.EVERYTHING):
        predictor = Predictor(
            trace.uses, planner._predictor(question, trace, case.chunk_numel).layout, question.machine
        )
        num_calls = max(call.number for call in trace.uses.calls) + 1
        chosen = case.saved or (Saved.NOTHING,) * num_calls
        num_bytes = call.product_bytes if level is Saved.PRODUCTS else call.saved_bytes
        with mock.patch.object(prediction, "step_with_saved", Sending(level)):
            steps = list(sent_steps(predictor, case.setting, chosen))
        texts = [f"{num}: {s:.3f} s ({num * num_bytes / 1e9:.0f} GB)" if s else f"{num}: -" for num, s in steps]
        print(f"  {level.value} sent by calls: {', '.join(texts)}", flush=True)


def main() -> None:
    for name in sys.argv[1:] or CASES:
        show(name, CASES[name])


if __name__ == "__main__":
    main()

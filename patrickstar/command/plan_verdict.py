"""The answer of ``patrickstar plan`` in at most eight lines, the verdict first."""

from __future__ import annotations

import json
from collections.abc import Sequence

from patrickstar.command.plan_report import budgets_line, parameters_text, text_lines, work_line
from patrickstar.planning.advice import Advice
from patrickstar.planning.planner import Answer
from patrickstar.planning.question import Question
from patrickstar.planning.recomputation import recomputation_text
from patrickstar.planning.setting import DoesNotFitError
from patrickstar.sizes import enough_size, show_size

_MOST_LINES = 8


def verdict_line(question: Question, found: Answer | DoesNotFitError) -> str:
    """Returns ``FITS`` with the step's time, or ``DOES NOT FIT`` with what is missing."""
    where = f"{question.workload.model} on {_gpus(question)}"
    if isinstance(found, DoesNotFitError):
        return f"DOES NOT FIT: {where}: {found}"
    seconds = found.chosen.step.seconds
    tflops = found.model_flops / seconds / 1e12
    return (
        f"FITS: {where}: {seconds:.3f} s per step, {found.tokens_per_second:,.0f} tokens/s, {tflops:.0f} model TFLOPS "
        f"per GPU ({parameters_text(found)})"
    )


def short_lines(question: Question, found: Answer | DoesNotFitError, advice: Sequence[Advice]) -> list[str]:
    """Returns what follows the verdict: work, memory, what bounds the step, advice, configuration."""
    if isinstance(found, DoesNotFitError):
        lines, last, word = [work_line(question), budgets_line(question)], [], "would fit"
    else:
        lines, last, word = _fitting(found), [f"configuration: {json.dumps(found.config())}"], "would help"
    room = _MOST_LINES - 1 - len(lines) - len(last)
    return [*lines, *(f"{word}: {item}" for item in advice[:room]), *last]


def _fitting(answer: Answer) -> list[str]:
    question, case, step = answer.question, answer.chosen, answer.chosen.step
    setting = question.setting
    work = work_line(question)
    if answer.all_recomputed is not None:
        work += f"; {recomputation_text(case.saved, step.seconds, answer.all_recomputed.seconds)}"
    disk = f", disk {show_size(case.disk_bytes)} of {show_size(setting.disk_bytes)}" if setting.disk_bytes else ""
    return [
        work,
        *text_lines(answer),
        f"device memory {show_size(step.peak_bytes)} of {show_size(setting.device_bytes)} (at least "
        f"{enough_size(case.least_device_bytes)}), host memory {show_size(case.host_peak_bytes)} of "
        f"{show_size(setting.host_bytes)} (at least {enough_size(case.least_host_bytes)}){disk}",
        step.roofline_line(),
    ]


def _gpus(question: Question) -> str:
    cluster, name = question.cluster, question.machine.name
    if cluster.num_ranks == 1:
        return f"one {name}"
    link = f", {cluster.link.name} between nodes" if cluster.nodes > 1 else ""
    return f"{cluster.num_ranks} x {name} ({cluster.gpus_per_node} per node{link})"

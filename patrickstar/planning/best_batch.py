"""Finds the batch size with the shortest step, for a given number of tokens per step."""

from __future__ import annotations

import dataclasses
import math

from patrickstar.planning.planner import Answer, Planner
from patrickstar.planning.question import Question

_PATIENCE = 2
"""Smaller batches in a row without a shorter step, after which the search ends."""


def best_batch(planner: Planner, question: Question, tokens: int) -> list[Answer]:
    """The plans of the batch sizes that were tried, the shortest step first. The batch size of ``question`` is ignored.

    Args:
        planner: answers each batch size.
        question: its setting gets the accumulation.
        tokens: of each step, on all GPUs together, with gradients accumulated over as many batches as that takes.

    Raises:
        DoesNotFitError: no batch size fits; that of the smallest.
        ValueError: as :func:`batch_questions`.
    """
    questions = batch_questions(question, tokens)
    answers: list[Answer] = []
    worse = 0
    for candidate in questions:
        needed = planner.needed_device_bytes(candidate)
        found = planner.try_answer(candidate) if needed <= candidate.setting.device_bytes else None
        if not isinstance(found, Answer):
            continue
        shortest = min((answer.chosen.step.seconds for answer in answers), default=math.inf)
        worse = worse + 1 if found.chosen.step.seconds >= shortest else 0
        answers.append(found)
        if worse == _PATIENCE:
            break
    if not answers:
        planner.answer(questions[-1])
    return sorted(answers, key=lambda answer: answer.chosen.step.seconds)


def batch_questions(question: Question, tokens: int) -> list[Question]:
    """The question with each batch size that gives ``tokens`` per step, the largest first.

    Raises:
        ValueError: none does, or the GPUs do not divide into the workload's groups.
    """
    question.check()
    workload = question.workload
    unit = workload.batch_unit
    each = workload.length * (question.cluster.num_ranks // workload.sharing_ranks) * unit
    count, rest = divmod(tokens, each)
    if rest or count == 0:
        raise ValueError(
            f"--tokens-per-step is {tokens}; {unit} sequences of {workload.length} tokens on each group of GPUs are "
            f"{each}: give a multiple of it"
        )
    parts = [part for part in range(count, 0, -1) if count % part == 0]
    return [
        dataclasses.replace(
            question,
            workload=dataclasses.replace(workload, batch=part * unit),
            setting=dataclasses.replace(question.setting, accumulation=count // part),
        )
        for part in parts
    ]

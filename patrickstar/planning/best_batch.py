"""Finds the batch size with the shortest step, for a given number of tokens per step."""

from __future__ import annotations

import dataclasses

from patrickstar.planning.planner import Answer, Planner
from patrickstar.planning.question import Question
from patrickstar.planning.setting import DoesNotFitError

_PATIENCE = 2
"""Smaller batches in a row without a shorter step, after which the search ends."""


def best_batch(planner: Planner, question: Question, tokens: int) -> list[Answer]:
    """The plans of the batch sizes that were tried, the shortest step first. Each step has ``tokens`` tokens on all
    GPUs together; what a batch leaves out is accumulated. The batch size of ``question`` is ignored.

    Raises:
        DoesNotFitError: the smallest batch does not fit.
        ValueError: no batch size gives this number of tokens.
    """
    questions = _questions(question, tokens)
    low, high = 0, len(questions)  # low fits, high is not known to
    refusal = planner.refusal(questions[0])
    if refusal is not None:
        raise refusal
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if planner.refusal(questions[middle]) is None else (low, middle)
    answers: list[Answer] = []
    worse = 0
    for smaller in reversed(questions[: low + 1]):
        try:
            answer = planner.answer(smaller)
        except DoesNotFitError:  # more bytes accumulate than with one backward
            continue
        shortest = min((one.chosen.step.seconds for one in answers), default=answer.chosen.step.seconds)
        worse = worse + 1 if answers and answer.chosen.step.seconds >= shortest else 0
        answers.append(answer)
        if worse == _PATIENCE:
            break
    if not answers:
        raise planner.refusal(questions[0]) or DoesNotFitError("no batch size fits with accumulation")
    return sorted(answers, key=lambda answer: answer.chosen.step.seconds)


def _questions(question: Question, tokens: int) -> list[Question]:
    """The question with all batch sizes, the smallest first."""
    workload = question.workload
    unit = workload.batch_unit
    each = workload.length * (question.cluster.num_ranks // workload.sharing_ranks) * unit
    count, rest = divmod(tokens, each)
    if rest or count == 0:
        raise ValueError(
            f"--tokens-per-step is {tokens}; {unit} sequences of {workload.length} tokens on each group of GPUs are "
            f"{each}: give a multiple of it"
        )
    parts = [part for part in range(1, count + 1) if count % part == 0]
    return [
        dataclasses.replace(
            question,
            workload=dataclasses.replace(workload, batch=part * unit),
            setting=dataclasses.replace(question.setting, accumulation=count // part),
        )
        for part in parts
    ]

"""Answers ``patrickstar plan``: plans what was asked, what would help, and prints both."""

from __future__ import annotations

import argparse
import dataclasses
import json

from patrickstar.command.plan_json import answer_as_dict, batch_as_dict, length_as_dict
from patrickstar.command.plan_question import question_of, questions_of_sizes
from patrickstar.command.plan_report import (
    advice_lines,
    answer_lines,
    batch_lines,
    comparison_lines,
    configuration_lines,
    length_lines,
    program_lines,
    refusal_lines,
)
from patrickstar.command.plan_verdict import short_lines, verdict_line
from patrickstar.planning.advice import Advice, advise, rescue
from patrickstar.planning.best_batch import batch_questions, best_batch
from patrickstar.planning.longest import longest
from patrickstar.planning.planner import Answer, Planner
from patrickstar.planning.question import Question
from patrickstar.planning.setting import DoesNotFitError


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """All that was planned."""

    question: Question
    """The question of :attr:`answer`."""
    answer: Answer | DoesNotFitError
    lengths: list[tuple[int, Answer | DoesNotFitError]]
    """``--longest``: GPUs that share a sequence, and the longest one."""
    batches: list[Answer]
    """``--tokens-per-step``: the batch sizes that were tried."""
    also: list[tuple[Question, Answer | DoesNotFitError]]
    """``--also``: other numbers of GPUs."""
    advice: list[Advice]


def tell(args: argparse.Namespace) -> int:
    """Prints the answer to checked arguments. Returns 0, or 1 if the model does not fit.

    Raises:
        ValueError: the model cannot be built, called with tokens or divided.
    """
    found = _find(args)
    if args.save and isinstance(found.answer, Answer):
        found.answer.chosen.plan.save(args.save)
    print(_json(found) if args.json else "\n".join(_text(args, found)))
    return 0 if isinstance(found.answer, Answer) else 1


def _find(args: argparse.Namespace) -> _Found:
    question, planner = question_of(args), Planner()
    lengths = _longest(planner, question) if args.longest else []
    batches: list[Answer] = []
    if lengths:
        answer = lengths[-1][1]
    elif args.tokens_per_step is not None:
        question = batch_questions(question, args.tokens_per_step)[-1]
        answer, batches = _fastest(planner, question, args.tokens_per_step)
    else:
        answer = planner.try_answer(question)
    if isinstance(answer, Answer):
        question = answer.question
    also = [(other, planner.try_answer(other)) for other in questions_of_sizes(question, args.also)]
    advice: list[Advice] = []
    if args.advice:
        is_refused = isinstance(answer, DoesNotFitError)
        advice = rescue(planner, question, answer) if is_refused else advise(planner, answer)
    return _Found(question=question, answer=answer, lengths=lengths, batches=batches, also=also, advice=advice)


def _json(found: _Found) -> str:
    said = answer_as_dict(found.answer) | {"advice": [item.as_dict() for item in found.advice]}
    if found.lengths:
        said["longest"] = [{"sequence_parallel": size} | length_as_dict(one) for size, one in found.lengths]
    if found.batches:
        said["batches"] = [batch_as_dict(one) for one in found.batches]
    if found.also:
        said["also"] = [answer_as_dict(other) for _, other in found.also]
    return json.dumps(said)


def _text(args: argparse.Namespace, found: _Found) -> list[str]:
    question, answer = found.question, found.answer
    mesh_size = 1 if question.workload.mesh is None else question.workload.mesh.size
    tables = length_lines([(size * mesh_size, one) for size, one in found.lengths]) + batch_lines(found.batches)
    if found.also:
        tables += comparison_lines([answer, *(other for _, other in found.also)],
                                   [question, *(other for other, _ in found.also)])  # fmt: skip
    listing = program_lines(answer) if args.listing and isinstance(answer, Answer) else []
    lines = [verdict_line(question, answer)]
    if not args.verbose:
        return [*lines, *short_lines(question, answer, found.advice), *tables, *listing]
    lines += answer_lines(answer) if isinstance(answer, Answer) else refusal_lines(question)
    lines += advice_lines(found.advice, answer) if args.advice else []
    lines += configuration_lines(answer) if isinstance(answer, Answer) else []
    return [*lines, *tables, *listing]


def _fastest(planner: Planner, question: Question, tokens: int) -> tuple[Answer | DoesNotFitError, list[Answer]]:
    """The fastest batch size for ``tokens`` per step, and all that were tried, or a refusal."""
    try:
        batches = best_batch(planner, question, tokens)
    except DoesNotFitError as refusal:
        return refusal, []
    return batches[0], batches


def _longest(planner: Planner, question: Question) -> list[tuple[int, Answer | DoesNotFitError]]:
    """The longest sequences that fit: on one GPU, then on the requested number of GPUs."""
    found: list[tuple[int, Answer | DoesNotFitError]] = []
    for size in sorted({1, question.workload.sequence_ranks}):
        workload = dataclasses.replace(question.workload, sequence_ranks=size)
        try:
            found.append((size, longest(planner, dataclasses.replace(question, workload=workload))))
        except DoesNotFitError as refusal:
            found.append((size, refusal))
    return found

"""Proposals of changes. Each is planned like the question itself, so its step time is known."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from patrickstar.config import Recompute, Speculation
from patrickstar.planning.activation_proposals import (
    fewer_activations,
    fused_loss,
    host_memory_for_activations,
    other_experts,
    tiles,
)
from patrickstar.planning.planner import CHUNK_SIZES, Answer, Planner
from patrickstar.planning.proposals import (
    Proposal,
    adapters_alone,
    fewer_state_bytes,
    more_device_memory,
    more_host_memory,
    most_device_bytes,
    on_a_disk,
    other_setting,
    other_work,
    recomputed,
    without_masters,
)
from patrickstar.planning.question import Question
from patrickstar.planning.setting import DoesNotFitError
from patrickstar.planning.sharded import CannotDivideError
from patrickstar.sizes import size_in_words
from patrickstar.tensor2d.cost import Mode

LEAST_GAIN = 0.01
"""Least gain in tokens per second of a proposal."""

_MORE_DEVICE_MEMORY = (1.25, 1.5, 2.0, 4.0)
_MORE_GPUS = (2, 4, 8)
_LENGTH_UNIT = 128
_MOST_CHANGES = 8
_TRIES = 4
_ENDLESS_DISK = 2**50
_BOUGHT = ("host memory", "GPUs")
"""Kinds of proposals that ask for more than the machine has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """A proposal and its plan."""

    proposal: Proposal
    answer: Answer

    def as_dict(self) -> dict[str, Any]:
        """Returns the advice in JSON types."""
        return {
            "text": self.proposal.text,
            "flags": list(self.proposal.flags),
            "step_seconds": self.answer.chosen.step.seconds,
            "tokens_per_second": self.answer.tokens_per_second,
            "config": self.answer.config(),
        }

    def __str__(self) -> str:
        step = self.answer.chosen.step.seconds
        flags = " ".join(self.proposal.flags)
        return f"{self.answer.tokens_per_second:,.0f} tokens/s, step {step:.3f} s: {self.proposal.text} ({flags})"


def advise(planner: Planner, answer: Answer) -> list[Advice]:
    """Returns changes that raise tokens per second by at least :data:`LEAST_GAIN`, best first."""
    least, numel = answer.tokens_per_second * (1 + LEAST_GAIN), answer.chosen.chunk_numel
    proposals = _proposals(planner, answer)
    found = _planned(proposals, lambda question: planner.glance(question, numel))
    return _best_of_each_kind([advice for advice in found if advice.answer.tokens_per_second >= least])


def rescue(planner: Planner, question: Question, refusal: DoesNotFitError) -> list[Advice]:
    """Returns changes that make a refused question fit, best first."""
    plan = functools.partial(_least, planner)
    found = list(_planned(_remedies(question, refusal), plan))
    if refusal.least_device_bytes is not None:
        for proposals in (fewer_activations(question), host_memory_for_activations(planner, question, None)):
            found += itertools.islice(_planned(proposals, plan), 1)  # each proposal traces a model, which takes seconds
    if refusal.least_host_bytes is not None:
        found += _host_memory_that_fits(planner, question, refusal)
        found += _fewer_bytes(planner, question)
        found += _disk_that_fits(planner, question)
    if refusal.least_device_bytes is not None:
        found += _largest_that_fits(planner, question, refusal)
    if not found:
        found = _changes_together(planner, question, refusal)
    return _best_of_each_kind(found)


def _least(planner: Planner, question: Question) -> Answer:
    """Returns an answer with the smallest chunks: if they do not fit, none do."""
    return planner.glance(question, CHUNK_SIZES[0])


def _planned(proposals: Iterator[Proposal], plan: Callable[[Question], Answer]) -> Iterator[Advice]:
    for proposal in proposals:
        try:
            yield Advice(proposal=proposal, answer=plan(proposal.question))
        except (DoesNotFitError, CannotDivideError):
            continue


def _best_of_each_kind(found: Sequence[Advice]) -> list[Advice]:
    """Returns one proposal per kind: the cheapest within :data:`LEAST_GAIN` of the kind's best. Within a kind,
    ``found`` begins with the cheapest. Proposals for the present machine come first, then :data:`_BOUGHT`, each the
    best first.
    """
    kept = []
    for kind in dict.fromkeys(advice.proposal.kind for advice in found):
        same = [advice for advice in found if advice.proposal.kind == kind]
        best = max(advice.answer.tokens_per_second for advice in same)
        kept.append(next(a for a in same if a.answer.tokens_per_second * (1 + LEAST_GAIN) >= best))
    return sorted(kept, key=lambda advice: (advice.proposal.kind in _BOUGHT, -advice.answer.tokens_per_second))


# For a model that fits


def _proposals(planner: Planner, answer: Answer) -> Iterator[Proposal]:
    question, step = answer.question, answer.chosen.step
    waits = step.seconds - step.compute_seconds > LEAST_GAIN * step.seconds  # else the GPU's work hides everything
    yield from _device_memory(question)
    if question.workload.checkpointing and question.setting.recompute is Recompute.ALWAYS:
        text = "keep activations instead of recomputing them"
        yield other_work("checkpointing", text, ("--no-checkpointing",), question, checkpointing=False)
        fused = fused_loss(question)
        if fused is not None:
            flags = ("--no-checkpointing", *fused.flags)
            yield other_work("checkpointing", f"{text}; {fused.text}", flags, fused.question, checkpointing=False)
    yield from host_memory_for_activations(planner, question, answer.chosen)
    yield from other_experts(question)
    if not waits:
        return
    yield from fewer_activations(question)
    yield from _host_memory(answer)
    yield from _options(question)
    if not question.workload.checkpointing:
        yield recomputed(question)
    batch = 2 * question.workload.batch
    text = f"{batch} sequences at a time: twice the work for each byte that is moved"
    yield other_work("batch", text, ("--batch-size", str(batch)), question, batch=batch)
    count = 2 * question.setting.accumulation
    text = f"add up the gradients of {count} backwards for each step, which then has twice the tokens"
    yield other_setting("accumulation", text, ("--gradient-accumulation", str(count)), question, accumulation=count)


def _device_memory(question: Question) -> Iterator[Proposal]:
    given, most = question.setting.device_bytes, most_device_bytes(question)
    wanted = {min(int(given * share), most) for share in _MORE_DEVICE_MEMORY}
    for num_bytes in sorted(size_in_words(wish) for wish in wanted if wish > given):
        yield more_device_memory(question, num_bytes)


def _host_memory(answer: Answer) -> Iterator[Proposal]:
    """Host memory for all updates to begin in backward: first the parameters' phase, then whole updates."""
    question, case = answer.question, answer.chosen
    if not question.setting.updates_take_memory:
        return
    trained = sum(chunk.shard_numel for chunk in case.plan.chunks if chunk.trainable)
    is_all_ahead = case.num_speculated_chunks + case.num_device_state_chunks >= _num_trainable(answer)
    wanted = [] if is_all_ahead else [(2, "for all updates to begin in backward")]
    if not is_all_ahead or case.num_two_phase_updates:
        wanted.append((14, "for updates to be whole in backward"))
    for bytes_each, what in wanted:
        num_bytes = size_in_words(case.least_host_bytes + bytes_each * trained + 2**30)
        if num_bytes > question.setting.host_bytes:
            yield more_host_memory(question, num_bytes, what)


def _num_trainable(answer: Answer) -> int:
    return sum(chunk.trainable for chunk in answer.chosen.plan.chunks)


def _options(question: Question) -> Iterator[Proposal]:
    setting = question.setting
    if setting.speculation is Speculation.NEVER:
        text = "begin updates in backward"
        yield other_setting("speculation", text, ("--speculation", "auto"), question, speculation=Speculation.AUTO)
    may_commit = setting.accumulation == 1 and question.clipping == 0
    if may_commit and setting.speculation is not Speculation.COMMIT:
        text = "optimizer-in-backward: updates are final in backward, with one backward per step and no clipping"
        flags = ("--speculation", "commit")
        yield other_setting("commit", text, flags, question, speculation=Speculation.COMMIT)
    if question.chunk_numel is not None:
        other = dataclasses.replace(question, chunk_numel=None)
        yield Proposal(kind="chunks", text="the best chunk size", flags=("--chunk-numel", "auto"), question=other)
    if setting.margin_use_ratio < 1.0:
        text = "more states on the GPU"
        yield other_setting("margin", text, ("--margin-use-ratio", "1"), question, margin_use_ratio=1.0)


# For a model that does not fit


def _remedies(question: Question, refusal: DoesNotFitError) -> Iterator[Proposal]:
    least_device = refusal.least_device_bytes
    if least_device is not None and not question.workload.checkpointing:
        yield recomputed(question)
    if least_device is not None:
        yield from _shared_sequences(question)
    if least_device is not None and least_device <= most_device_bytes(question):
        for share in (1.0, 1.1, 1.25):
            yield more_device_memory(question, size_in_words(int(least_device * share)))
    if refusal.least_host_bytes is not None:
        yield from _device_memory(question)
    for factor in _MORE_GPUS:
        count = question.cluster.gpus_per_node * factor
        if count <= 2 * question.machine.gpus_per_socket:
            cluster = dataclasses.replace(question.cluster, gpus_per_node=count)
            text = f"{count} GPUs in each machine, with a batch and budgets of their own"
            flags = ("--gpus-per-node", str(count))
            other = dataclasses.replace(question, cluster=cluster)
            yield Proposal(kind="GPUs", text=text, flags=flags, question=other)


def _shared_sequences(question: Question) -> Iterator[Proposal]:
    """More of the existing GPUs share each sequence, beside a two-dimensional mesh if there is one."""
    mesh = question.workload.mesh
    if mesh is not None and mesh.mode is Mode.ONE:
        return
    together = 1 if mesh is None else mesh.size
    for size in _MORE_GPUS:
        if size > question.workload.sequence_ranks and question.cluster.num_ranks % (size * together) == 0:
            text = f"{size} GPUs share each sequence, so that each has 1/{size} of its activations"
            flags = ("--sequence-parallel", str(size))
            yield other_work("sequences", text, flags, question, sequence_ranks=size)


def _fewer_bytes(planner: Planner, question: Question) -> list[Advice]:
    """The first kind of inexact storage that fits, the more exact first; else adapters."""
    for proposals in (fewer_state_bytes, without_masters, adapters_alone):
        found = list(_planned(proposals(question), functools.partial(_least, planner)))
        if found:
            return found
    return []


def _disk_that_fits(planner: Planner, question: Question) -> list[Advice]:
    """Disk bytes that placement would use if the disk were unlimited."""
    try:
        endless = _least(planner, on_a_disk(question, _ENDLESS_DISK).question)
        proposal = on_a_disk(question, endless.chosen.disk_bytes)
        return [Advice(proposal=proposal, answer=_least(planner, proposal.question))]
    except DoesNotFitError:
        return []


def _host_memory_that_fits(planner: Planner, question: Question, refusal: DoesNotFitError) -> list[Advice]:
    """The host memory that the refusal names; if that is refused too, the next one named."""
    for _ in range(_TRIES):
        if refusal.least_host_bytes is None:
            break
        proposal = more_host_memory(question, refusal.least_host_bytes)
        try:
            return [Advice(proposal=proposal, answer=_least(planner, proposal.question))]
        except DoesNotFitError as error:
            refusal = error
    return []


def _largest_that_fits(planner: Planner, question: Question, refusal: DoesNotFitError) -> list[Advice]:
    """The largest batch that fits; if one sequence does not fit, the greatest length."""
    work = question.workload

    def batch_of(units: int) -> Proposal:
        count = units * work.batch_unit
        text, flags = f"{_sequences(count)}, the largest batch that fits", ("--batch-size", str(count))
        return other_work("batch", text, flags, question, batch=count)

    units = work.batch // work.batch_unit
    found = _largest(planner, batch_of, units, refusal) if units > 1 else None
    if found is not None:
        return [found]
    if work.mesh is not None:  # a mesh may not divide every length
        return []
    unit = _LENGTH_UNIT if work.length > _LENGTH_UNIT else 1
    batch = ("--batch-size", "1") if work.batch > 1 else ()

    def length_of(count: int) -> Proposal:
        text = f"one sequence of {count * unit} tokens is the longest that fits"
        flags = (*batch, "--seq-len", str(count * unit))
        return other_work("length", text, flags, question, batch=1, length=count * unit)

    found = _largest(planner, length_of, -(-work.length // unit), None)
    return [found] if found is not None else []


def _largest(
    planner: Planner, proposal_of: Callable[[int], Proposal], too_many: int, refusal: DoesNotFitError | None
) -> Advice | None:
    """Returns the proposal with the largest fitting count below ``too_many``. Activations grow about linearly with the
    count, so two plans give a guess.
    """

    def plan(count: int) -> Advice | DoesNotFitError:
        proposal = proposal_of(count)
        try:
            return Advice(proposal=proposal, answer=_least(planner, proposal.question))
        except DoesNotFitError as error:
            return error

    fits = plan(1)
    if isinstance(fits, DoesNotFitError):
        return None
    top = refusal if refusal is not None else plan(too_many)
    if isinstance(top, Advice) or top.least_device_bytes is None:
        return fits
    first = fits.answer.chosen.least_device_bytes
    there = fits.proposal.question.setting.device_bytes
    each = max(top.least_device_bytes - first, 1) / max(too_many - 1, 1)
    best, low, high = fits, 1, too_many  # low fits, high does not
    guess = 1 + int((there - first) / each)
    for _ in range(_TRIES):
        guess = min(max(guess, low + 1), high - 1)
        if guess <= low:
            break
        tried = plan(guess)
        if isinstance(tried, Advice):
            best, low, guess = tried, guess, guess + 1
        else:
            high, guess = guess, guess - 1
    return best


# For a model that no single change makes fit


def _changes_together(planner: Planner, question: Question, refusal: DoesNotFitError) -> list[Advice]:
    """Adds changes, each for the last refusal, until the model fits."""
    changes: dict[str, Proposal] = {}
    for _ in range(_MOST_CHANGES):
        change = _next_change(question, refusal)
        if change is None:
            break
        changes[change.kind] = change  # replaces an earlier change of its kind, on which it builds
        question = change.question
        try:
            answer = _least(planner, question)
        except DoesNotFitError as error:
            refusal = error
            continue
        text = "; ".join(change.text for change in changes.values())
        flags = tuple(flag for change in changes.values() for flag in change.flags)
        proposal = Proposal(kind="together", text=text, flags=flags, question=question)
        return [Advice(proposal=proposal, answer=answer)]
    return []


def _next_change(question: Question, refusal: DoesNotFitError) -> Proposal | None:
    """The cheapest change that may resolve the refusal."""
    work = question.workload
    if refusal.least_host_bytes is not None:
        return more_host_memory(question, refusal.least_host_bytes)
    if refusal.least_device_bytes is None:
        return None
    if not work.checkpointing:
        return recomputed(question)
    fewer = fused_loss(question) or tiles(question)
    if fewer is not None:
        return fewer
    if question.setting.device_bytes < refusal.least_device_bytes <= most_device_bytes(question):
        return more_device_memory(question, size_in_words(refusal.least_device_bytes))
    if work.batch > work.batch_unit:
        count = work.batch // work.batch_unit // 2 * work.batch_unit or work.batch_unit
        return other_work("batch", _sequences(count), ("--batch-size", str(count)), question, batch=count)
    if work.length > _LENGTH_UNIT and work.mesh is None:
        length = work.length // 2
        return other_work("length", f"{length} tokens each", ("--seq-len", str(length)), question, length=length)
    return None


def _sequences(count: int) -> str:
    return f"{count} sequences at a time" if count > 1 else "one sequence at a time"

"""Proposals that change what a GPU computes at a time: a fused loss, tiles of tokens, host memory for activation
offload, experts that GPUs divide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from patrickstar.config import LossComputation
from patrickstar.experts.exchanged import find_experts
from patrickstar.module.tiled_modules import PROPOSED_TILE_TOKENS, find_tileable
from patrickstar.planning.case import Case
from patrickstar.planning.models import build_model
from patrickstar.planning.planner import Planner
from patrickstar.planning.proposals import Proposal, more_host_memory, other_setting, other_work, recomputed
from patrickstar.planning.question import Question
from patrickstar.planning.setting import DoesNotFitError
from patrickstar.sequence.fused_loss import check_fusable

_LEAST_TOKENS = 2 * PROPOSED_TILE_TOKENS
"""Tokens on one GPU. With fewer, gradient sums take the memory that tiles save."""
_AMPLE_BYTES = 2**44


def fewer_activations(question: Question) -> Iterator[Proposal]:
    """Yields a fused loss, then tiles with it, where they apply; then both with checkpointing, if it is off."""
    begins: list[list[Proposal]] = [[]] if question.workload.checkpointing else [[], [recomputed(question)]]
    for begin in begins:
        changes = list(begin)
        for change in (fused_loss, tiles):
            proposal = change(changes[-1].question if changes else question)
            if proposal is not None:
                changes.append(proposal)
                yield _together(changes)


def fused_loss(question: Question) -> Proposal | None:
    """A loss without logits; None if the model has it or does not support it."""
    work = question.workload
    if work.mesh is not None or work.loss is LossComputation.FUSED or not _takes(work.model, check_fusable):
        return None
    text = "the loss without logits"
    return other_work("loss", text, ("--fused-loss",), question, loss=LossComputation.FUSED)


def tiles(question: Question) -> Proposal | None:
    """MLPs and norms of checkpointed layers in tiles; None if they are tiled, cannot be, or would save nothing."""
    work = question.workload
    tokens = work.batch // work.batch_unit * work.length // work.sequence_ranks
    is_worth_it = work.checkpointing and tokens >= _LEAST_TOKENS
    if work.tile_tokens or not is_worth_it or not _takes(work.model, find_tileable):
        return None
    text = f"MLPs and norms in tiles of {PROPOSED_TILE_TOKENS} tokens"
    flags = ("--tile-tokens", str(PROPOSED_TILE_TOKENS))
    return other_work("tiles", text, flags, question, tile_tokens=PROPOSED_TILE_TOKENS)


def other_experts(question: Question) -> Iterator[Proposal]:
    """Yields experts that all GPUs divide, or share if they divide them; nothing if the model cannot."""
    work, size = question.workload, question.cluster.num_ranks
    if work.expert_ranks > 1:
        text = "share experts among the GPUs"
        yield other_work("experts", text, ("--expert-parallel", "1"), question, expert_ranks=1)
    elif size > 1 and work.sharing_ranks == 1 and _takes(work.model, _into_parts(size)):
        text = f"divide experts among {size} GPUs, so that tokens travel and no expert is gathered"
        yield other_work("experts", text, ("--expert-parallel", str(size)), question, expert_ranks=size)


def host_memory_for_activations(planner: Planner, question: Question, case: Case | None) -> Iterator[Proposal]:
    """Yields host memory sizes for activation offload, the least first. Yields nothing if the present host memory
    suffices or no activation may be offloaded.

    Args:
        planner: plans the offload with ample host memory.
        question: the user's question.
        case: the answer's; None: it does not fit.
    """
    ample = other_setting("host memory", "", (), question, host_bytes=_AMPLE_BYTES)
    offloaded_bytes = 0 if case is None else case.offloaded_bytes
    if planner.most_offloaded_bytes(ample.question) <= offloaded_bytes:
        return
    try:
        there = planner.answer(ample.question).chosen
    except DoesNotFitError:
        return
    if there.offloaded_bytes <= offloaded_bytes:
        return
    for held_bytes in sorted((there.least_host_bytes, there.host_bytes, there.host_peak_bytes)):
        if held_bytes + there.offloaded_bytes > question.setting.host_bytes:
            yield more_host_memory(
                question, held_bytes + there.offloaded_bytes, "for activations between forward and backward"
            )


def _together(changes: list[Proposal]) -> Proposal:
    return Proposal(
        kind="activations",
        text="; ".join(change.text for change in changes),
        flags=tuple(flag for change in changes for flag in change.flags),
        question=changes[-1].question,
    )


@functools.cache
def _into_parts(size: int) -> Callable[[nn.Module], Any]:
    return functools.partial(find_experts, size=size)


@functools.cache
def _takes(name: str, check: Callable[[nn.Module], Any]) -> bool:
    """True if ``check`` accepts the model named by ``--model``."""
    try:
        check(build_model(name, 1, 1, checkpointing=False).module)
    except ValueError:
        return False
    return True

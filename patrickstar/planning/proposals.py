"""Proposals: questions that differ in one part from the user's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from patrickstar.config import Master, QuantizationType, Speculation, States, rule_of
from patrickstar.machine.budgets import expected_device_bytes
from patrickstar.planning.defaults import LORA_RANK
from patrickstar.planning.question import Question
from patrickstar.sizes import enough_size, show_size, size_in_words


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """A question that differs in one part."""

    kind: str
    """The changed part. Of several proposals of one kind, the cheapest good one is kept."""
    text: str
    """Text for people."""
    flags: tuple[str, ...]
    """Flags to add to the user's command."""
    question: Question


def more_device_memory(question: Question, num_bytes: int) -> Proposal:
    """A larger budget of device memory."""
    text = f"{show_size(num_bytes)} of the GPU's {show_size(question.machine.gpu_bytes)}"
    flags = ("--device-memory", enough_size(num_bytes))
    return other_setting("device memory", text, flags, question, device_bytes=num_bytes)


def more_host_memory(question: Question, least_bytes: int, what_for: str = "") -> Proposal:
    """A larger budget of host memory, rounded up to a short text."""
    num_bytes = size_in_words(least_bytes)
    text = f"{show_size(num_bytes)} of host memory{what_for and ', '}{what_for}"
    flags = ("--host-memory", enough_size(num_bytes))
    return other_setting("host memory", text, flags, question, host_bytes=num_bytes)


def fewer_state_bytes(question: Question) -> Iterator[Proposal]:
    """Yields moments in fewer bytes, the more exact first."""
    for states, words in ((States.BF16, "in bfloat16, stochastically rounded"), (States.EIGHT_BIT, "in 8 bits")):
        if list(States).index(states) > list(States).index(question.setting.states):
            has_variance = "exp_avg_sq" in rule_of(question.setting.optimizer).states
            moments = "momentum and variance" if has_variance else "momentum"
            text = f"store {moments} {words}, which is no longer exact"
            yield other_setting("states", text, ("--states", states.value), question, states=states)


def without_masters(question: Question) -> Iterator[Proposal]:
    """Yields parameters without masters, with the more exact moments first."""
    setting = question.setting
    may = question.workload.precision == "bf16" and setting.speculation is not Speculation.ALWAYS
    if not may or setting.master is Master.STOCHASTIC:
        return
    for states in list(States)[list(States).index(setting.states) :]:
        moments = {States.FP32: "", States.BF16: ", moments in bfloat16", States.EIGHT_BIT: ", moments in 8 bits"}
        text = f"no float32 masters, bfloat16 parameters rounded stochastically{moments[states]}: no longer exact"
        flags = (*(() if states is setting.states else ("--states", states.value)), "--master", "stochastic")
        yield other_setting("masters", text, flags, question, states=states, master=Master.STOCHASTIC)


def on_a_disk(question: Question, num_bytes: int) -> Proposal:
    """A disk of ``num_bytes`` for optimizer states."""
    num_bytes = size_in_words(num_bytes)
    text = (
        f"{show_size(num_bytes)} of a disk for optimizer states, which reads {question.machine.disk_gbps:g} GB/s and "
        "writes as much meanwhile (--disk-bandwidth)"
    )
    return other_setting("disk", text, ("--disk", enough_size(num_bytes)), question, disk_bytes=num_bytes)


def adapters_alone(question: Question) -> Iterator[Proposal]:
    """Yields LoRA on a 4-bit base, if all parameters were trained."""
    work = question.workload
    if work.lora_rank == 0 and work.quantization is None and work.mesh is None:
        text = f"train LoRA's adapters of rank {LORA_RANK} alone, on a base that is frozen in 4 bits (QLoRA)"
        flags = ("--lora-rank", str(LORA_RANK), "--quantization", QuantizationType.NF4.value)
        changes = {"lora_rank": LORA_RANK, "quantization": QuantizationType.NF4}
        yield other_work("adapters", text, flags, question, **changes)


def most_device_bytes(question: Question) -> int:
    """Most GPU memory that an engine may have."""
    by_nccl = question.cluster.num_ranks > 1
    return max(expected_device_bytes(question.machine.gpu_bytes, by_nccl), question.setting.device_bytes)


def recomputed(question: Question) -> Proposal:
    """Checkpointed layers."""
    text = "recompute activations in backward, which leaves more of the GPU to the model"
    return other_work("checkpointing", text, ("--checkpointing",), question, checkpointing=True)


def other_work(kind: str, text: str, flags: tuple[str, ...], question: Question, **changes: Any) -> Proposal:
    """A proposal with changed fields of the workload."""
    workload = dataclasses.replace(question.workload, **changes)
    return Proposal(kind=kind, text=text, flags=flags, question=dataclasses.replace(question, workload=workload))


def other_setting(kind: str, text: str, flags: tuple[str, ...], question: Question, **changes: Any) -> Proposal:
    """A proposal with changed fields of the setting."""
    setting = dataclasses.replace(question.setting, **changes)
    return Proposal(kind=kind, text=text, flags=flags, question=dataclasses.replace(question, setting=setting))

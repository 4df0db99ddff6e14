"""Notes that are added to errors of a step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.config import parse_bytes
from patrickstar.sizes import enough_size, show_size

_BACKWARD_NOTE = (
    "Nothing was updated. Run forward and backward of this step again: the most that was asked for is known now, and "
    "chunks make room for it. If it fails again, turn on activation checkpointing, lower the batch size or raise "
    "device_memory."
)


def explain_failed_backward(error: BaseException, num_committed: int) -> None:
    """Adds the state after a failed backward to its error."""
    if not hasattr(error, "add_note"):  # Python 3.10
        return
    if num_committed > 0:
        error.add_note(
            f"{num_committed} chunks had been updated before this backward failed (optimizer.speculation is "
            '"commit"): the model is updated in part, go on from a checkpoint.'
        )
    elif isinstance(error, torch.OutOfMemoryError):
        error.add_note(_BACKWARD_NOTE)


def explain_other_engines(error: BaseException, num_open: int) -> None:
    """Adds how to free the memory of this process's ``num_open`` other engines, if the error comes from them."""
    is_in_the_way = isinstance(error, _C.MemoryBudgetError) or "all engines of a process" in str(error)
    if num_open > 0 and is_in_the_way and hasattr(error, "add_note"):  # not with Python 3.10
        error.add_note(
            f"Other engines that are open in this process: {num_open}. engine.close() frees one that is no longer "
            "needed, patrickstar.close_open_engine() all of them."
        )


def explain_lack_of_memory(
    error: torch.OutOfMemoryError, module: nn.Module, report: Mapping[str, Any], remedies: Iterable[str], once: str = ""
) -> None:
    """Adds what holds the device's memory and what helps, after all chunks that may leave were evicted.

    Called while the activations are still alive.

    Args:
        error: from PyTorch.
        module: whose forward failed.
        report: the runtime's at that access.
        remedies: settings that reduce activation memory, the most helpful first.
        once: whole sentences on why the forward is not run again; empty: it was.
    """
    if not hasattr(error, "add_note"):  # Python 3.10
        return
    activations, values = report["device_activation_bytes"], report["device_chunk_buffer_bytes"]
    budget, asked = report["device_budget_bytes"], _asked_bytes(str(error))
    place = _innermost_module(error, module)
    where = f" in {place}" if place else ""
    more = f", where {show_size(asked)} more were asked for" if asked else ""
    least = activations + values + asked
    helpful = "".join(f"{remedy}; " for remedy in (*remedies, "a smaller batch or shorter sequences"))
    error.add_note(
        f"Activations and inputs take {show_size(activations)}{where}{more}, and the parameters in use "
        f"{show_size(values)}; device_memory is {show_size(budget)}. Nothing was updated. What helps: "
        f"{helpful}or a device_memory of at least "
        f"{enough_size(max(least, budget))} (this point alone "
        f"needs {show_size(least)}; blocks that are free but in pieces come on top)." + (f" {once}" if once else "")
    )


def _asked_bytes(message: str) -> int:
    """Bytes in PyTorch's "Tried to allocate 2.00 GiB"; 0 if the message has none."""
    found = re.search(r"Tried to allocate (\d+(?:\.\d+)? (?:KiB|MiB|GiB))\b", message)
    return parse_bytes(found[1], "the request") if found else 0


def _innermost_module(error: BaseException, root: nn.Module) -> str:
    """Name within ``root`` of the innermost module whose forward raised; empty if unknown."""
    names = {id(module): name for name, module in root.named_modules() if name}
    innermost = ""
    trace = error.__traceback__
    while trace is not None:
        innermost = names.get(id(trace.tb_frame.f_locals.get("self")), innermost)
        trace = trace.tb_next
    return innermost


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error's message."""
    return str(error).split(". ")[0].split("; ")[0]

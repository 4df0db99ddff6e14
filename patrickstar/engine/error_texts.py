"""What is said with errors of a step."""

from __future__ import annotations

import torch

_BACKWARD_NOTE = (
    "Nothing was updated. Run forward and backward of this step again: the most that was asked for is known now, and "
    "chunks make room for it. If it fails again, lower the batch size or raise device_memory."
)


def explain_failed_backward(error: BaseException, num_committed: int) -> None:
    """Says in a note what an error in backward left behind."""
    if not hasattr(error, "add_note"):  # Python 3.10
        return
    if num_committed > 0:
        error.add_note(
            f"{num_committed} chunks had been updated before this backward failed (optimizer.speculation is "
            '"commit"): the model is updated in part, go on from a checkpoint.'
        )
    elif isinstance(error, torch.OutOfMemoryError):
        error.add_note(_BACKWARD_NOTE)


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error's message."""
    return str(error).split(". ")[0].split("; ")[0]

"""Prints the program of a step (csrc/plan/ops.h): one line per instruction that takes time or memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from patrickstar import _C
from patrickstar.profiling import PlayedInstruction


def listing_lines(instructions: Sequence[PlayedInstruction], accesses: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a table by access. Instructions of the launching thread without bytes are omitted.

    Args:
        instructions: of one step.
        accesses: accesses of its timeline.
    """
    norm = next(one for one in instructions if one.op == "norm")
    lines = [
        f"program of a step: {len(accesses)} accesses, {len(instructions)} instructions; the norm is known after "
        f"{norm.end_seconds:.3f} s by prediction",
        f"{'begin ms':>12} {'takes ms':>10}  {'lane':10} instruction",
    ]
    for one in instructions:
        if one.op == "begin" and one.access is not None:
            lines.append(f"access {one.access}, {accesses[one.access]['phase'].name.lower()}")
        elif one.op == "norm":
            lines.append("end of the step")
        if one.lane == _C.Lane.LAUNCH and one.amount == 0:
            continue
        amount = f", {one.shown_amount}" if one.shown_amount else ""
        begin, takes = one.begin_seconds * 1e3, one.seconds * 1e3
        lines.append(f"{begin:12.3f} {takes:10.3f}  {one.lane.name.lower():10} {one.name}{amount}")
    return lines

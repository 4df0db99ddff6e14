"""Command line: a table of all pairs of tools."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch

import benchmark.foreign_tools
from benchmark.foreign_tools import deepspeed_runs, runs, titan_runs
from benchmark.foreign_tools.deepspeed_runs import HALF, SETUPS
from benchmark.foreign_tools.runs import MORE, STEPS, Trained, compare, on_ranks
from benchmark.foreign_tools.titan_runs import Precision

Case = tuple[str, Callable[[str], bool]]
"""The name of a line, and a function that prints it and returns whether it is as expected."""


def from_deepspeed(folder: Path) -> Iterator[Case]:
    """DeepSpeed's checkpoints, and those that its ``ds_to_universal.py`` makes of them."""
    for setup in (*SETUPS, HALF):
        for ranks in (1, 2):

            def straight(name: str, setup=setup, ranks=ranks) -> bool:
                saved = on_ranks(ranks, deepspeed_runs.saved, folder / name, setup)
                num_losses = 1 if setup is HALF else MORE  # its updates round masters
                return compare(name, runs.loaded(folder / name, setup.dtype), saved, num_losses)

            yield f"DeepSpeed {setup.name}, ranks: {ranks} → PatrickStar", straight
        if setup is HALF:
            continue

        def by_universal(name: str, setup=setup) -> bool:
            saved = on_ranks(2, deepspeed_runs.saved, folder / name, setup)
            deepspeed_runs.convert(folder / name, folder / f"{name}, converted")
            return compare(name, runs.loaded(folder / f"{name}, converted", setup.dtype), saved)

        yield f"DeepSpeed {setup.name}, ranks: 2 → ds_to_universal → PatrickStar", by_universal


def to_deepspeed(folder: Path, own: dict[str, Trained]) -> Iterator[Case]:
    """Exports of PatrickStar's, loaded by DeepSpeed."""
    for setup in SETUPS:
        for ranks in (1, 2):

            def universal(name: str, setup=setup, ranks=ranks) -> bool:
                found = on_ranks(ranks, deepspeed_runs.loaded, folder / setup.dtype / "universal", setup)
                return compare(name, found, own[setup.dtype], MORE if setup.keeps_groups else 1)

            yield f"PatrickStar → universal → DeepSpeed {setup.name}, ranks: {ranks}", universal


def with_titan(folder: Path, own: dict[str, Trained]) -> Iterator[Case]:
    """Both directions with torchtitan."""
    for precision in Precision:
        for ranks in (1, 2):
            if precision is Precision.MIXED and ranks == 1:
                continue  # FSDP2's alone
            kind = f"{'plain' if ranks == 1 else 'FSDP2, 2 ranks'}, {precision.value}"
            is_rounded = precision is Precision.BF16
            num_losses = 1 if is_rounded else MORE  # its updates round values

            def to_own(name: str, precision=precision, ranks=ranks, num_losses=num_losses) -> bool:
                saved = on_ranks(ranks, titan_runs.saved, folder / name, precision)
                return compare(name, runs.loaded(folder / name / f"step-{STEPS}", precision.dtype), saved, num_losses)

            def from_own(name: str, precision=precision, ranks=ranks, num_losses=num_losses) -> bool:
                found = on_ranks(ranks, titan_runs.loaded, folder / precision.dtype / "dcp", precision)
                expected = own[precision.dtype]
                expected = expected.rounded() if precision is Precision.BF16 else expected
                return compare(name, found, expected, num_losses)

            yield f"torchtitan, {kind} → PatrickStar", to_own
            yield f"PatrickStar → DCP → torchtitan, {kind}{' (rounded)' if is_rounded else ''}", from_own


def main() -> None:
    """Exits with 1 if a line is not as expected."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.foreign_tools",
        description=benchmark.foreign_tools.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="cases whose names contain this")
    only = parser.parse_args().only
    os.environ["DS_ACCELERATOR"] = "cpu"
    tools = ", ".join(f"{tool} {version(tool.lower())}" for tool in ("DeepSpeed", "torchtitan"))
    print(f"torch {torch.__version__}, {tools}; CPU, gloo\n")
    print("| from, to | values and Adam's states | next two losses, relative difference |\n|---|---|---|")
    well = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = {dtype: runs.exported(folder / dtype, dtype) for dtype in ("fp32", "bf16")}
        for title, case in (*with_titan(folder, own), *from_deepspeed(folder), *to_deepspeed(folder, own)):
            if only in title:
                well &= case(title)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()

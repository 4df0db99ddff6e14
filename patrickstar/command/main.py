"""``patrickstar`` and ``python -m patrickstar``: finds the subcommand and runs it.

A subcommand's modules are imported when it runs, so the overview needs neither PyTorch nor the extension.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import sys
from collections.abc import Sequence

from patrickstar import __version__
from patrickstar.command.flags import WRONG_USAGE, words_after

PROG = "patrickstar"


@dataclasses.dataclass(frozen=True)
class Subcommand:
    """One subcommand."""

    module: str
    """Module with ``main(arguments, prog)``, which returns the exit status."""
    does: str
    """Description in one line."""


SUBCOMMANDS = {
    "plan": Subcommand("patrickstar.command.plan", "says whether a model fits, how fast it trains and what would help"),
    "finetune": Subcommand("patrickstar.finetune.main", "tunes a Hugging Face language model on conversations"),
    "run": Subcommand("patrickstar.command.run", "runs a script of transformers, TRL or Accelerate in an engine"),
    "spot": Subcommand("patrickstar.command.spot", "runs a command and ends it in time when a cloud takes its machine"),
    "profile": Subcommand("patrickstar.profile", "runs a training script and shows one step: a trace and a picture"),
    "env": Subcommand("patrickstar.env", "says what this machine offers, what is missing and what mends it"),
    "config": Subcommand("patrickstar.command.config_file", "checks a configuration file, or writes its JSON Schema"),
    "checkpoint": Subcommand(
        "patrickstar.command.checkpoints", "lists, inspects, verifies, exports, merges checkpoints"
    ),
    "ones": Subcommand("patrickstar.command.ones", "simulates how schedulers share a cluster among training jobs"),
    "bench": Subcommand("patrickstar.command.bench", "measures what of this machine decides how long a step is"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subcommand named by the first word; returns its exit status, or 2 for an unknown name."""
    words = words_after(arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"{PROG} {__version__}")
        return 0
    found = SUBCOMMANDS.get(words[0])
    if found is None:
        near = difflib.get_close_matches(words[0], SUBCOMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SUBCOMMANDS)}"
        print(f"{PROG}: there is no subcommand {words[0]!r}; {hint}", file=sys.stderr)
        return WRONG_USAGE
    try:
        module = importlib.import_module(found.module)
    except ImportError as error:
        print(f"{PROG} {words[0]}: {error}; {PROG} env says what is missing and what mends it", file=sys.stderr)
        return WRONG_USAGE
    return module.main(words[1:], prog=f"{PROG} {words[0]}")


def overview() -> str:
    """Returns the output of ``patrickstar`` without arguments."""
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:<{width}}   {subcommand.does}" for name, subcommand in SUBCOMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROG} [--version] SUBCOMMAND ...",
            "",
            "Trains models whose parameters, gradients and Adam states do not fit in GPU memory.",
            "",
            *lines,
            "",
            f"{PROG} SUBCOMMAND --help says more of each.",
        ]
    )

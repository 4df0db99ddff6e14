"""Writes docs/refused_models.md: language models of transformers that sequence parallelism refuses, with reasons.

    python tools/refused_models.py > docs/refused_models.md

Each class is built small (tests/text_models.py) and checked with two ranks as threads, as at the start of an engine.
tests/ranks/test_every_text_model.py compares the page with engines of two processes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

from patrickstar.config import MatrixMode, parse_config
from patrickstar.parallel.proof import prove_rewrites
from tests.text_models import NOT_BUILT, build, text_models

HEADER = """# Models whose sequences cannot be shared

Of the causal and masked language models of transformers {version}, {num_right} train with
[sequences that several GPUs share](guides/sequence_parallel.md) as on one GPU. The others are refused by name before
the first step:

| they | models |
|---|---|"""
REASONS = [
    ("computes its attention itself", "compute attention outside of transformers' `AttentionInterface`"),
    ("is an encoder-decoder model", "have an encoder and a decoder"),
    ("has layers of", "have layers of other kinds than full and sliding attention, the gated delta rule and Mamba-2"),
    ("has layers with", "have the selective scan of the first Mamba"),
    ("no layer of|has no attention", "have no attention"),
    ("asks for", "have scores with a bias of their own"),
    ("computes with its attention mask|a mask of its own|has an attention mask", "bring a mask of their own"),
    ("computes something else", "mix tokens outside of attention"),
    ("could not be called|no table of tokens", "cannot be called with tokens alone, to be proven right"),
]


def refusal(name: str) -> str | None:
    """Returns the error's text; None if the model is accepted."""
    config = parse_config({"optimizer": {"type": "SGD"}, "sequence_parallel": {"size": 2}})
    try:
        prove_rewrites(build(name), config, MatrixMode.TWO)
    except ValueError as error:
        return str(error)
    return None


def page() -> str:
    """Returns the text of docs/refused_models.md."""
    found: dict[str, list[str]] = {reason: [] for _, reason in REASONS}
    names = text_models()
    for name in names:
        said = refusal(name)
        if said is not None:
            found[next(reason for pattern, reason in REASONS if re.search(pattern, said))].append(name)
    num_right = len(names) - sum(map(len, found.values()))
    lines = [HEADER.format(version=transformers.__version__, num_right=num_right)]
    lines += [
        f"| {reason} | {', '.join(f'`{name}`' for name in refused)} |" for reason, refused in found.items() if refused
    ]
    lines += ["", "Not tried:", ""]
    lines += [f"* `{name}`: {why}" for name, why in sorted(NOT_BUILT.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the page."""
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        text = page()
    print(text, end="")


if __name__ == "__main__":
    main()

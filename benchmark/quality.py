"""Quality of schemes with fewer bytes per parameter: held-out losses of a GPT-2 or a Llama from scratch.

The GPT-2 (``examples/finetune_gpt2.py``) trains on CPython's language reference, or with ``--docstrings-of torch
transformers`` on some 10 MB of these packages' docstrings; the Llama (``patrickstar finetune``) on such docstrings,
packed. Each scheme and seed is a training, on the GPUs in turn. The seed decides initial values and order. A
difference between schemes is significant only if it exceeds the spread of the float32 runs over seeds. Schemes are
those of ``optimizer.states`` with AdamW, ``stochastic`` (states of 8 bits, no masters), ``lion``, and recipes of
products in FP8 with float32 states. All others multiply in bfloat16. Lion has a third of AdamW's learning rate and
three times its weight decay, as its authors recommend (Chen et al. 2023).

* loss: on the held-out text after the last step: mean, least and most over the seeds.
* against fp32: mean over the seeds of the relative difference to the float32 run with the same seed.
* curves: drawn with ``--plot``.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmark.common import provenance
from patrickstar.choices import Fp8Recipe

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "finetune_gpt2.py"
_RATE, _DECAY = 5e-4, 0.01  # the example's
SCHEMES = {
    "fp32": {},
    "bf16": {"states": "bf16"},
    "8bit": {"states": "8bit"},
    "stochastic": {"states": "8bit", "master": "stochastic"},
    "lion": {"optimizer": "Lion", "lr": _RATE / 3, "weight-decay": 3 * _DECAY},
    **{f"fp8-{recipe.value}": {"fp8": recipe.value} for recipe in Fp8Recipe},
}
"""Flags of the example for each scheme."""
_SCORE = re.compile(r"step (\d+): held-out loss ([0-9.]+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schemes", nargs="+", choices=SCHEMES, default=[name for name in SCHEMES if not name.startswith("fp8")]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model-size", default="small", help="of the GPT-2, or HIDDENxLAYERS of a Llama")
    parser.add_argument("--vocab-size", type=int, default=2048, help="of the tokenizer")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--docstrings-of", nargs="+", default=[], metavar="PACKAGE", help="text instead of CPython's")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the curves there")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains each scheme and seed in its own process.

    Raises:
        SystemExit: a Llama without docstrings, or a training that failed.
    """
    if _is_llama(args) and not args.docstrings_of:
        raise SystemExit("a Llama trains on docstrings; give --docstrings-of, such as torch transformers")
    curves: dict[str, dict[int, dict[int, float]]] = {scheme: {} for scheme in args.schemes}
    asked = [(scheme, seed) for seed in args.seeds for scheme in args.schemes]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        text = _write_docstrings(args, Path(folder)) if args.docstrings_of else None
        found = pool.map(lambda number: _train(*asked[number], args, text, number), range(len(asked)))
        for (scheme, seed), curve in zip(asked, found, strict=True):
            curves[scheme][seed] = curve
    rows = [_row(scheme, curves) for scheme in args.schemes]
    if args.plot:
        _plot(curves, args.plot)
    names = ("model_size", "vocab_size", "seq_len", "docstrings_of", "steps", "batch_size", "seeds")
    settings = {name: getattr(args, name) for name in names}
    return {"case": "quality", **settings, "rows": rows, "curves": curves, **provenance()}


def _is_llama(args: argparse.Namespace) -> bool:
    return "x" in args.model_size and args.model_size[0].isdigit()


def _write_docstrings(args: argparse.Namespace, folder: Path) -> Path:
    """Docstrings, each paragraph once; files in a pseudo-random order, so that the held-out end is like the rest."""
    roots = [Path(importlib.util.find_spec(package).origin).parent for package in args.docstrings_of]
    named = {f"{root.name}/{path.relative_to(root)}": path for root in roots for path in root.rglob("*.py")}
    order = sorted(named, key=lambda name: hashlib.sha256(name.encode()).digest())
    paragraphs: dict[str, str] = {}
    with ProcessPoolExecutor() as pool:
        for docstrings in pool.map(_docstrings, [named[name] for name in order], chunksize=32):
            for paragraph in (paragraph for docstring in docstrings for paragraph in docstring.split("\n\n")):
                paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    if _is_llama(args):
        return _write_conversations(paragraphs.values(), folder / "docstrings.jsonl")
    path = folder / "docstrings.txt"
    path.write_text("\n\n".join(paragraphs.values()), encoding="utf-8")
    return path


def _write_conversations(paragraphs: Iterable[str], path: Path) -> Path:
    """Each paragraph as the answer to the same prompt."""
    lines = [json.dumps({"prompt": "docstring", "answer": paragraph}) for paragraph in paragraphs if paragraph.strip()]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _docstrings(path: Path) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # a template, or a file of another encoding
        return []
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return [docstring for docstring in found if docstring]


def _train(scheme: str, seed: int, args: argparse.Namespace, text: Path | None, number: int) -> dict[int, float]:
    """Held-out losses by step; ``number``: of the training, which decides its GPU."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"seed": seed, "steps": args.steps, "batch-size": args.batch_size, "seq-len": args.seq_len}
        flags |= {"vocab-size": args.vocab_size, "precision": "bf16", "lr": _RATE, "weight-decay": _DECAY}
        flags |= {"output-dir": folder} | SCHEMES[scheme]
        if _is_llama(args):
            hidden, layers = args.model_size.split("x")
            flags |= {"hidden": hidden, "layers": layers, "data": text, "samples": 0}
            program = ["-m", "patrickstar", "finetune", "--packing"]
        else:
            flags |= {"model-size": args.model_size} | ({"text": text} if text else {})
            program = [str(EXAMPLE)]
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        num_gpus = torch.cuda.device_count()
        gpu = {"CUDA_VISIBLE_DEVICES": str(number % num_gpus)} if num_gpus > 0 else {}
        with subprocess.Popen(
            [sys.executable, *program, "--overwrite", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | gpu,
        ) as training:
            output = list(map(partial(_shown, f"{scheme}, seed {seed}"), training.stdout or []))
    if training.returncode != 0:
        sys.exit(f"{' '.join(program)} ({scheme}) ended with {training.returncode}:\n{''.join(output)[-2000:]}")
    return {int(step): float(loss) for step, loss in _SCORE.findall("".join(output))}


def _shown(name: str, line: str) -> str:
    """The line, which goes to standard error if it has a loss."""
    if _SCORE.search(line):
        print(f"{name}: {line.rstrip()}", file=sys.stderr, flush=True)
    return line


def _row(scheme: str, curves: dict[str, dict[int, dict[int, float]]]) -> dict[str, Any]:
    last = {seed: curve[max(curve)] for seed, curve in curves[scheme].items()}
    exact = {seed: curve[max(curve)] for seed, curve in curves.get("fp32", {}).items()}
    gaps = [last[seed] / exact[seed] - 1 for seed in last if seed in exact]
    return {
        "scheme": scheme, "loss": statistics.mean(last.values()), "least": min(last.values()),
        "most": max(last.values()), "against_fp32": statistics.mean(gaps) if gaps else None,
    }  # fmt: skip


def _plot(curves: dict[str, dict[int, dict[int, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, gaps) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    exact = curves.get("fp32", {})
    for color, (scheme, by_seed) in zip((f"C{number}" for number in range(10)), curves.items(), strict=False):
        for number, (seed, curve) in enumerate(by_seed.items()):
            steps = sorted(curve)
            style = {"color": color, "alpha": 0.7, "marker": ".", "label": scheme if number == 0 else None}
            losses.plot(steps, [curve[step] for step in steps], **style)
            if seed in exact:
                gaps.plot(steps, [100 * (curve[step] / exact[seed][step] - 1) for step in steps], **style)
    losses.set_ylabel("held-out loss, a line for each seed")
    gaps.set_ylabel("% above fp32 with the same seed")
    for axes in (losses, gaps):
        axes.set_xlabel("step")
        axes.legend(title="scheme")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def format_table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['model_size']} on {' and '.join(result['docstrings_of']) or 'CPython'}, "
        f"{result['steps']} steps of {result['batch_size']} x {result['seq_len']} tokens, "
        f"seeds {', '.join(map(str, result['seeds']))}",
        f"{'scheme':<15}{'loss':>9}{'least':>9}{'most':>9}{'against fp32':>14}",
    ]
    for row in result["rows"]:
        gap = "" if row["against_fp32"] is None else f"{row['against_fp32']:+.2%}"
        lines.append(f"{row['scheme']:<15}{row['loss']:>9.4f}{row['least']:>9.4f}{row['most']:>9.4f}{gap:>14}")
    return "\n".join(lines)

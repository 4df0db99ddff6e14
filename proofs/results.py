"""Results of proofs as JSON: points, planted bugs, command, commit, hardware, versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proofs.cases import Proof
from proofs.runner import Options

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "proofs" / "results"


def commit() -> str:
    """The commit of the checkout, with a + if files differ from it; empty outside of one."""
    known = os.environ.get("PATRICKSTAR_PROOF_COMMIT")
    if known is not None:
        return known
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def hardware() -> str:
    """The processor, the cores that this process may use, and the machine's memory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, no GPU used"


def versions() -> str:
    """Versions of what takes part."""
    import torch

    return f"torch {torch.__version__}, Python {platform.python_version()}, Linux {platform.release().split('-')[0]}"


def command_of(proof: Proof, options: Options) -> str:
    """The command that repeats the run."""
    parts = [f"make prove-{proof.name}"]
    arguments = [f"--minutes {options.minutes:g}"] if options.minutes != Options.minutes else []
    arguments += [f"--jobs {options.jobs}"] if options.jobs != Options.jobs else []
    arguments += [f"--seed {options.seed}"] if options.seed else []
    arguments += [f"--points {options.most_points}"] if options.most_points is not None else []
    return " ".join(parts + ([f'ARGS="{" ".join(arguments)}"'] if arguments else []))


def write(
    proof: Proof,
    options: Options,
    began: float,
    found: Sequence[dict[str, Any]],
    tried: Sequence[dict[str, Any]],
    well: bool,
    folder: Path,
) -> Path:
    """Writes ``folder/NAME.json``, and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "proof": proof.name,
        "claim": proof.claim,
        "points": sum(case["points"] for case in tried),
        "kind": proof.points,
        "holds": well,
        "seconds": round(time.time() - began),
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "command": command_of(proof, options),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "cases": tried,
        "planted": found,
    }
    file = folder / f"{proof.name}.json"
    text = json.dumps(result, indent=1)
    for folder in (ROOT, sys.base_prefix):  # of tracebacks
        text = text.replace(f"{folder}/", "")
    file.write_text(text + "\n")
    return file


def read(folder: Path) -> list[dict[str, Any]]:
    """All results of a folder."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


if __name__ == "__main__":
    print(hardware(), versions(), commit(), sep="\n", file=sys.stderr)

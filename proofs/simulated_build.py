"""Builds the core with a deterministic scheduler and planted bugs, beside a copy of the package (build/proofs/races).

The in-place extension is untouched. ``proofs/scheduler`` replaces queues, events and clock. ``planted_races`` has the
bugs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from proofs.planted_races import BUGS, SIMULATION

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "proofs" / "races"
COPIED = (
    "patrickstar",
    "tests",
    "proofs",
    "build_backend",
    "csrc",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


def copy_tree(tree: Path) -> None:
    """Copies what is built and run; files that did not change keep their times, so that ninja builds the rest."""
    made = tree.with_name(f"{tree.name}.new")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, made / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy2(ROOT / name, made / name)
    for file in (ROOT / "proofs" / "scheduler").iterdir():
        shutil.copy2(file, made / "csrc" / "common" / file.name)
    for edit in (*SIMULATION, *BUGS):
        edit.apply(made / "csrc")
    tree.mkdir(exist_ok=True)
    for path in sorted(made.rglob("*")):
        target = tree / path.relative_to(made)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif not target.exists() or target.read_bytes() != path.read_bytes():
            shutil.copy2(path, target)
            os.utime(target)
    for path in sorted(tree.rglob("*"), reverse=True):
        gone = not (made / path.relative_to(tree)).exists()
        if gone and path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts:
            path.unlink()
    shutil.rmtree(made)


def build() -> Path:
    """Returns the folder from which ``patrickstar`` is imported with the simulated core."""
    tree = FOLDER / "tree"
    copy_tree(tree)
    environment = os.environ | {"PATRICKSTAR_OPTIMIZATION": "-O1", "PATRICKSTAR_CUDA": "0"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--build-temp", str(FOLDER / "objects")]
    subprocess.run(command, cwd=tree, env=environment, check=True, stderr=subprocess.DEVNULL)
    return tree


if __name__ == "__main__":
    print(build())

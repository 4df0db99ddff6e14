"""Compiles the C and C++ files that a proof preloads (LD_PRELOAD), and calls their functions."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "proofs"


def preload(*sources: str) -> dict[str, str]:
    """Compiles files of this repository; returns the variables under which a process preloads them.

    Raises:
        CalledProcessError: there is no compiler, or a file does not compile.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    libraries = []
    for source in sources:
        path = ROOT / source
        library = FOLDER / f"{path.stem}.so"
        compiler = os.environ.get("CXX", "c++") if path.suffix == ".cpp" else os.environ.get("CC", "cc")
        standard = "-std=c++17" if path.suffix == ".cpp" else "-std=gnu11"
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [compiler, standard, "-shared", "-fPIC", "-O1", "-w", "-o", str(unfinished), str(path), "-ldl"]
        subprocess.run(command, check=True)
        unfinished.replace(library)
        libraries.append(str(library))
    return {"LD_PRELOAD": " ".join(libraries)}


def process() -> ctypes.CDLL:
    """All functions of this process, those of preloaded libraries too."""
    return ctypes.CDLL(None)

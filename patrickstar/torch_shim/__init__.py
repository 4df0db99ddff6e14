"""Attaches the PyTorch that is here to the core, through the shim for its minor version.

Shims lie in this folder. For a PyTorch without one a shim is compiled into the user's cache, which takes less than a
minute and needs a C++ compiler. `python -m patrickstar.torch_shim` compiles it ahead.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from patrickstar.torch_shim.compiling import (
    FILES,
    Torch,
    compile_command,
    find_compiler,
    shim_name,
    sources_folder,
)

FOLDER = Path(__file__).resolve().parent


def attach() -> None:
    """Attaches the imported or importable PyTorch. Raises ImportError if there is no shim for it."""
    import torch

    core = importlib.import_module("patrickstar._C")  # not the package's attribute, which attaches
    cuda = core.build_info()["cuda"]
    name = shim_name(torch.__version__, cuda, torch._C._GLIBCXX_USE_CXX11_ABI)
    packed = FOLDER / name
    core.attach_torch(str(packed if packed.exists() else compiled(torch, cuda, name)))


def compiled(torch: Any, cuda: str | None, name: str) -> Path:
    """The shim `name` in the user's cache, compiled if it is missing. Raises ImportError if that fails."""
    sources = sources_folder()
    digest = hashlib.sha256(torch.__version__.encode())
    for file in FILES:
        digest.update((sources / file).read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "patrickstar" / "torch_shim"
    target = cache / digest.hexdigest()[:16] / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank compiles, the others wait
        if not target.exists():
            _compile(Torch(torch.__version__, Path(torch.__file__).parent, cuda, _has_gloo(torch)), sources, target)
    return target


def _has_gloo(torch: Any) -> bool:
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def _compile(torch: Torch, sources: Path, target: Path) -> None:
    there = ", ".join(sorted(file.name.removesuffix(".so") for file in FOLDER.glob("torch*.so"))) or "none"
    missing = f"PatrickStar has no shim for PyTorch {torch.version} (here: {there})"
    compiler = find_compiler()
    if compiler is None:
        raise ImportError(f"{missing}, and there is no C++ compiler to make one; install g++, or one of these versions")
    print(f"patrickstar: compiling the shim for PyTorch {torch.version}, once", file=sys.stderr, flush=True)
    unfinished = target.with_suffix(".unfinished")
    try:
        command = compile_command(compiler, sources, torch, unfinished)
    except FileNotFoundError as error:
        raise ImportError(f"{missing}, and {error}") from None
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise ImportError(f"{missing}, and it does not compile: {first}")
    unfinished.replace(target)

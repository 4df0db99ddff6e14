"""Builds wheels with shims for several versions of PyTorch, checks them (auditwheel) and tries them, into dist/.

    python tools/wheel.py                          # for the PyTorch of this Python (make wheel)
    python tools/wheel.py --torch 2.11.0 2.12.1    # for these, too: headers are fetched into .cache
    python tools/wheel.py --with 2.14.1            # for this one, too, which is installed beside, and tried as well
    python tools/wheel.py --matrix                 # all supported versions, without and with CUDA (make wheels)

The core is compiled once. A wheel's version names its part: patrickstar-0.7.0+cpu, or +cu13 with the CUDA part.
auditwheel determines the oldest Linux; PyTorch's and NVIDIA's libraries are not packed. A wheel is then installed into
environments of its own, with the PyTorch that is here and with those of --with, and trains a model there
(wheel_trial.py): losses must be equal to 1e-6. dist/index.html lists all wheels with their hashes, for `pip install
--find-links`.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import environment  # noqa: E402
import fetching  # noqa: E402
from patrickstar_build import torch_versions  # noqa: E402
from patrickstar_pins import (  # noqa: E402
    CUDA_ARCHITECTURES,
    CUDA_TOOLKIT_MAJOR,
    CUDA_TORCH,
    SECOND_TORCH,
    WHEEL_TORCHES,
)

DIST = ROOT / "dist"
PARTS = ("cpu", "cuda")

# Libraries that PyTorch, imported first, has loaded.
NOT_PACKED = ["libtorch*.so", "libc10*.so", "libcudart.so.*", "libnccl.so.*"]


def run(command: list[str], failure: str, **options: Any) -> None:
    """Runs a command; exits with `failure` if it fails."""
    if subprocess.run(command, **options).returncode != 0:
        sys.exit(f"wheel: {failure}; see the message above")


def only_wheel(folder: str) -> Path:
    """Returns the only wheel in `folder`."""
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def build(settings: Mapping[str, str]) -> Path:
    """Builds the wheel with these environment variables, lets auditwheel name its platform and returns its path in
    dist/.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as checked:
        command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", "-w", plain]
        run([*command, str(ROOT)], "it was not built", env=os.environ | settings)
        excluded = [part for name in NOT_PACKED for part in ("--exclude", name)]
        command = [sys.executable, "-m", "auditwheel", "repair", "--patcher", "none", *excluded, "-w", checked]
        run([*command, str(only_wheel(plain))], "auditwheel does not accept it")
        made = only_wheel(checked)
        DIST.mkdir(exist_ok=True)
        wheel = Path(shutil.move(made, DIST / made.name))
    size, seconds = wheel.stat().st_size / 1e6, time.monotonic() - started
    print(f"wheel: {wheel.relative_to(ROOT)}, {size:.1f} MB, built in {seconds:.0f} s", flush=True)
    return wheel


def folders_variable(folders: Iterable[Path]) -> dict[str, str]:
    """PATRICKSTAR_SHIMS for setup.py."""
    return {"PATRICKSTAR_SHIMS": os.pathsep.join(map(str, folders))}


def cuda_settings(folders: Iterable[Path]) -> dict[str, str]:
    """The environment of the CUDA part's build, with NVIDIA's compiler from PyPI, for those PyTorchs in `folders` that
    have its major version of CUDA.
    """
    fetching.fetch_cuda()
    fitting = [folder for folder in folders if str(torch_versions(folder)[1]).startswith(f"{CUDA_TOOLKIT_MAJOR}.")]
    return folders_variable(fitting) | {
        "PATRICKSTAR_CUDA": "1",
        "PATRICKSTAR_TORCH": str(fetching.fetch_torch(CUDA_TORCH.partition("==")[2])),
        "CUDA_HOME": str(fetching.TOOLKIT),
        "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST") or CUDA_ARCHITECTURES,
        "PYTHONPATH": os.pathsep.join([str(fetching.CUDA), os.environ.get("PYTHONPATH", "")]),  # nvidia.nccl
    }


def try_out(wheel: Path, python: str, *, with_dependencies: bool) -> dict[str, Any]:
    """Installs the wheel for `python` and trains there; returns what wheel_trial.py prints."""
    started = time.monotonic()
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", str(wheel)]
    if with_dependencies:
        run(command, "it cannot be installed")
    run([*command, "--no-index", "--force-reinstall", "--no-deps"], "it cannot be installed")
    with tempfile.TemporaryDirectory() as folder:
        # -I: PYTHONPATH has the checkout
        done = subprocess.run(
            [python, "-I", "-W", "ignore", str(ROOT / "tools" / "wheel_trial.py")],
            cwd=folder,
            env=os.environ | {"XDG_CACHE_HOME": folder},
            stdout=subprocess.PIPE,
            text=True,
        )
    if done.returncode != 0:
        sys.exit(f"wheel: {wheel.name} does not train; see the message above")
    found = json.loads(done.stdout.splitlines()[-1])
    losses = ", ".join(f"{loss:.6f}" for loss in found["losses"])
    seconds = time.monotonic() - started
    print(f"wheel: PyTorch {found['torch']} with {found['shim']}: losses {losses}; {seconds:.0f} s", flush=True)
    return found


def check_equal(first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Exits if two trials have other losses, or the same PyTorch."""
    for one, two in zip(first["losses"], other["losses"], strict=True):
        if abs(one - two) > 1e-6:
            sys.exit(f"wheel: PyTorch {other['torch']} has loss {two!r}, PyTorch {first['torch']} {one!r}")
    if first["shim"] == other["shim"]:
        sys.exit(f"wheel: both trials ran with {first['shim']}; give --with another minor version")


def page(wheels: Iterable[Path]) -> str:
    """A page for pip's --find-links: a link with its hash for each wheel."""
    links = []
    for wheel in sorted(wheels):
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        links.append(f'<a href="{quote(wheel.name)}#sha256={digest}">{html.escape(wheel.name)}</a><br>')
    return "\n".join(["<!DOCTYPE html>", "<title>patrickstar</title>", *links, ""])


def main() -> None:
    """Builds, checks and tries wheels."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="+", metavar="VERSION", default=[], help="shims for these versions, too")
    parser.add_argument("--with", nargs="+", metavar="VERSION", default=[], dest="beside", help="that, and try them")
    parser.add_argument("--second", action="store_true", help=f"--with {SECOND_TORCH}, the version that CI tries")
    parser.add_argument("--matrix", action="store_true", help=f"shims for {', '.join(WHEEL_TORCHES)}")
    parser.add_argument("--part", nargs="+", choices=PARTS, help="parts of the core (default with --matrix: both)")
    options = parser.parse_args()
    beside = [*options.beside, *[SECOND_TORCH] * options.second]
    installed = [fetching.install_torch(version) for version in dict.fromkeys(beside)]
    wanted = [version for version in [*options.torch, *WHEEL_TORCHES * options.matrix] if version not in beside]
    folders = [folder for _, folder in installed] + [fetching.fetch_torch(version) for version in wanted]
    parts = options.part or (PARTS if options.matrix else [None])
    for part in parts:
        settings = {"cpu": {"PATRICKSTAR_CUDA": "0"}, None: {}}.get(part)
        wheel = build(cuda_settings(folders) if settings is None else folders_variable(folders) | settings)
        trials = [try_out(wheel, python, with_dependencies=True) for python, _ in installed]
        if part != "cuda":
            beside_this = environment.beside(sys.executable, "wheel")
            trials.insert(0, try_out(wheel, beside_this, with_dependencies=False))
        for trial in trials[1:]:
            check_equal(trials[0], trial)
    (DIST / "index.html").write_text(page(DIST.glob("*.whl")), encoding="utf-8")


if __name__ == "__main__":
    main()

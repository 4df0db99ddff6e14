"""Downloads wheels with pip and keeps parts of them; used by check_cuda.py and wheel.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache"
# Files that a shim is compiled from. They do not depend on the version of Python.
TORCH_PARTS = (
    "torch/include/",
    "torch/lib/libc10.so",
    "torch/lib/libc10_cuda.so",
    "torch/lib/libtorch_cpu.so",
    "torch/share/cmake/Torch/TorchConfig.cmake",
    "torch/version.py",
)


def fetch(requirement: str, kept: tuple[str, ...], folder: Path) -> None:
    """Downloads a wheel and keeps the files that begin with one of `kept`, unless they exist."""
    marker = folder / f"{requirement}.complete"
    if marker.exists():
        return
    started = time.monotonic()
    download = folder / "download"
    shutil.rmtree(download, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    if subprocess.run([*command, "-d", str(download), requirement]).returncode != 0:
        sys.exit(f"{requirement} could not be downloaded; see pip's message")
    (wheel,) = download.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith(kept) and not member.is_dir():
                path = Path(archive.extract(member, folder))
                path.chmod(0o755 if member.external_attr >> 16 & 0o111 else 0o644)
    print(
        f"fetched {requirement}: {wheel.stat().st_size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s", flush=True
    )
    shutil.rmtree(download)
    marker.touch()


def fetch_torch(version: str) -> Path:
    """Fetches what a shim for that version is compiled from; returns the folder `torch`."""
    folder = CACHE / f"torch-{version}"
    fetch(f"torch=={version}", TORCH_PARTS, folder)
    return folder / "torch"

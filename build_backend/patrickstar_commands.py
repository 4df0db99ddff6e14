"""Commands that install what a build needs, for this machine. Standard library only."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from patrickstar_pins import CPU_INDEX, TORCH


def has_nvidia_driver() -> bool:
    """True if this machine has an NVIDIA driver; the GPU need not be visible to this process."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def torch_command() -> str:
    """The command that installs the PyTorch that fits this machine: with an NVIDIA driver, CUDA's."""
    index = "" if has_nvidia_driver() else f" --extra-index-url {CPU_INDEX}"
    return f"{sys.executable} -m pip install torch=={TORCH}{index}"


def cuda_torch_command() -> str:
    """The command that puts a PyTorch with CUDA in the place of one without."""
    return f"{sys.executable} -m pip install --force-reinstall torch=={TORCH}"


def toolkit_command(cuda: str) -> str:
    """The command, or words, that install nvcc for PyTorch's CUDA version, such as "13.0".

    From 13 on NVIDIA's wheels are whole toolkits.
    """
    if int(cuda.split(".")[0]) >= 13:
        return f'{sys.executable} -m pip install "cuda-toolkit[nvcc,nvvm,crt,cccl]=={cuda}.*"'
    return f"install CUDA toolkit {cuda} from https://developer.nvidia.com/cuda-toolkit-archive and set CUDA_HOME to it"

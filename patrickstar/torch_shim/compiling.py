"""Compiles the shim between the core and one version of PyTorch. Standard library only: the package's build uses it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("shim.cpp", "group.cpp", "cuda.cpp")
FILES = (*(f"torch_shim/{name}" for name in SOURCES), "torch_shim/parts.h", "torch_api/torch_api.h")
"""Files that a shim is compiled from, below csrc."""


@dataclass(frozen=True)
class Torch:
    """A PyTorch to compile against."""

    version: str
    folder: Path
    """Holds ``include`` and ``lib``."""
    cuda: str | None = None
    """CUDA's version, such as "13.0"; None: a shim without the CUDA part."""
    has_gloo: bool = True


def shim_name(torch_version: str, cuda: str | None, cxx11_abi: bool = True) -> str:
    """The shim's file name: torch2.13.cpu.so, torch2.11.cu13.so. Patch releases of PyTorch share a shim."""
    major, minor = torch_version.split("+")[0].split(".")[:2]
    part = f"cu{cuda.split('.')[0]}" if cuda else "cpu"
    return f"torch{major}.{minor}.{part}{'' if cxx11_abi else '.pre-cxx11'}.so"


def has_cxx11_abi(torch: Torch) -> bool:
    """True if PyTorch was compiled with the present ABI of std::string; some builds of 2.6 were not."""
    config = torch.folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    return re.search(r"_GLIBCXX_USE_CXX11_ABI=0", text) is None


def file_name(torch: Torch) -> str:
    """The file name of the shim for `torch`."""
    return shim_name(torch.version, torch.cuda, has_cxx11_abi(torch))


def sources_folder() -> Path:
    """Folder that holds torch_shim and torch_api: of an installed package, else of the checkout."""
    packed = Path(__file__).resolve().parent / "csrc"
    return packed if packed.exists() else Path(__file__).resolve().parents[2] / "csrc"


def cuda_runtime(torch: Torch) -> tuple[Path, Path] | None:
    """(headers, libcudart.so) of CUDA's runtime: of CUDA_HOME, NVIDIA's wheels beside PyTorch, or the system."""
    major = torch.cuda.split(".")[0]
    homes = [
        os.environ.get("CUDA_HOME"),
        *(torch.folder.parent / "nvidia" / name for name in (f"cu{major}", "cuda_runtime")),
    ]
    for home in map(Path, filter(None, [*homes, "/usr/local/cuda"])):
        libraries = [*home.glob("lib*/libcudart.so*")]
        if (home / "include" / "cuda_runtime_api.h").exists() and libraries:
            return home / "include", min(libraries)
    return None


def compile_command(compiler: str, sources: Path, torch: Torch, target: Path, flags: Iterable[str] = ()) -> list[str]:
    """The command that makes `target` from the sources below `sources`. Raises FileNotFoundError without CUDA's
    headers.
    """
    macros = [f'-DPATRICKSTAR_TORCH_VERSION="{torch.version}"', f"-D_GLIBCXX_USE_CXX11_ABI={int(has_cxx11_abi(torch))}"]
    folders, libraries = [], ["-lc10", "-ltorch_cpu"]
    if torch.has_gloo:
        macros.append("-DPATRICKSTAR_WITH_C10D=1")
    if torch.cuda:
        runtime = cuda_runtime(torch)
        if runtime is None:
            raise FileNotFoundError(f"no cuda_runtime_api.h of CUDA {torch.cuda}; set CUDA_HOME to a CUDA toolkit")
        macros.append("-DPATRICKSTAR_WITH_CUDA=1")
        folders.append(runtime[0])
        libraries += ["-lc10_cuda", str(runtime[1])]
    include = torch.folder / "include"
    folders += [include, include / "torch" / "csrc" / "api" / "include"]
    return [
        *[compiler, "-shared", "-fPIC", "-std=c++20" if _wants_cxx20(torch) else "-std=c++17", "-O2", "-g0", "-s"],
        *["-fvisibility=hidden", *flags, *macros, f"-I{sources}"],
        *(part for folder in folders for part in ("-isystem", str(folder))),
        *["-o", str(target), *(str(sources / "torch_shim" / name) for name in SOURCES)],
        *[f"-L{torch.folder / 'lib'}", *libraries],
    ]


def find_compiler() -> str | None:
    """$CXX, else c++ or g++ of PATH."""
    return next(filter(None, map(shutil.which, filter(None, [os.environ.get("CXX"), "c++", "g++"]))), None)


def _wants_cxx20(torch: Torch) -> bool:
    major, minor = torch.version.split("+")[0].split(".")[:2]
    return (int(major), int(minor)) >= (2, 12)

"""Sources, flags and libraries of the extension. Shared by setup.py and tools/check_cuda.py.

Needs no PyTorch and changes nothing; every path it gives is absolute or below `root`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from patrickstar_commands import cuda_torch_command, has_nvidia_driver, toolkit_command

# PATRICKSTAR_SANITIZE: what is compiled watches itself as it runs (tools/sanitize.py builds and runs it).
SANITIZE = os.environ.get("PATRICKSTAR_SANITIZE", "")
_WATCHED = ["-g", "-fno-omit-frame-pointer"]  # reports name lines, and every frame on the way to them
SANITIZE_FLAGS = {
    "": ["-g0"],
    # Python's own flags have -fwrapv, under which no signed overflow is an error.
    "address": [
        *_WATCHED,
        "-fsanitize=address,undefined,float-cast-overflow",
        "-fno-wrapv",
        "-D_GLIBCXX_ASSERTIONS",
    ],
    "thread": [*_WATCHED, "-fsanitize=thread"],
}
if SANITIZE not in SANITIZE_FLAGS:
    sys.exit(f"PATRICKSTAR_SANITIZE is {SANITIZE!r}; give address or thread, or unset it")

# PATRICKSTAR_OPTIMIZATION: -O1 where compiling fast matters more than what comes of it
CXX_FLAGS = [
    os.environ.get("PATRICKSTAR_OPTIMIZATION", "-O1" if SANITIZE else "-O3"),
    *SANITIZE_FLAGS[SANITIZE],
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-DNDEBUG",
]
# Numerics: no contraction into fma, IEEE division and square root, denormals kept (all but the first are nvcc's
# defaults, named here because results must equal the CPU's to the last bit).
NVCC_FLAGS = ["-O3", "--fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false", "-lineinfo"]
NVCC_FLAGS += ["--expt-relaxed-constexpr", "--threads", "2"]
CUDA_MACRO = ("PATRICKSTAR_WITH_CUDA", "1")
NANOBIND_FLAGS = ["-fno-strict-aliasing", "-DNB_COMPACT_ASSERTIONS"]  # as nanobind's src/nb_combined.cpp says
REGISTER_FLAG = "-O0" if CXX_FLAGS[0] == "-O0" else "-O1"  # for registration of bindings, which runs once
# A shim is not instrumented: PyTorch is not either.
SHIM_FLAGS = ["-Wall", "-Wextra", "-Wno-unused-parameter"]
_SANITIZE_LINK_FLAGS = {
    "": ["-s"],
    # UBSan's shared library and ASan's have functions of the same names; where reports go would be told to one only.
    "address": ["-fsanitize=address,undefined", "-static-libubsan", "-Wl,--exclude-libs,libubsan.a"],
    "thread": ["-fsanitize=thread"],
}
# Without the symbol table: a third of the size, and nothing here is debugged from a wheel.
LINK_FLAGS = _SANITIZE_LINK_FLAGS[SANITIZE]

# Compiled in no unit with others: [Note: ISA files] in csrc/optim/cpu_isa.h.
ISA_FILE = re.compile(r"cpu_(scalar|avx2|avx512|[a-z0-9]*neon|sve)\.cpp")

# With no GPU in sight (CI, a build for others) and no PyTorch to ask.
_FALLBACK_ARCHITECTURES = "7.5;8.0;9.0+PTX"


def sources(root: Path, *, with_cuda: bool) -> list[str]:
    """The files of the core, relative to `root`, sorted. `cuda_*`, `nccl_*` and `*.cu` belong to the CUDA part."""
    folder = root / "csrc"
    found = [path for path in folder.rglob("*.cpp") if path.parent.name != "torch_shim"]
    found = [path for path in found if with_cuda or not path.name.startswith(("cuda_", "nccl_"))]
    if with_cuda:
        found += folder.rglob("*.cu")
    return sorted(str(path.relative_to(root)) for path in found)


def shares_libstdcxx(compiler: str) -> bool:
    """True if this C++ compiler links with the libstdc++.so that PyTorch uses.

    A compiler that links it statically makes an extension that loads and crashes at its first stream or exception.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text("#include <sstream>\nvoid probe(std::ostringstream& out) { out << 1.0; }\n", encoding="utf-8")
        command = [compiler, "-shared", "-fPIC", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode == 0 and b"libstdc++.so" in library.read_bytes()


def find_cuda_home(torch_cuda: str | None) -> str | None:
    """The CUDA toolkit's folder, as PyTorch wants it in CUDA_HOME, or None.

    $CUDA_HOME is believed. Else a toolkit must have headers beside its compiler: an `nvcc` on PATH may be a script that
    calls the real one elsewhere. The first of `torch_cuda`'s major version, such as "13.0", is preferred, then the
    first of all.
    """
    told = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if told:
        return told if (Path(told) / "bin" / "nvcc").exists() else None
    on_path = shutil.which("nvcc")
    candidates = [Path(on_path).resolve().parent.parent] if on_path else []
    candidates += [Path("/usr/local/cuda"), Path("/opt/cuda"), *_wheel_folders("nvidia.cu13")]
    homes = [str(home) for home in candidates if _is_toolkit(home)]
    matching = [home for home in homes if torch_cuda and cuda_version(home)[0] == int(torch_cuda.split(".")[0])]
    return next(iter(matching or homes), None)


def _is_toolkit(home: Path) -> bool:
    folders = [home / "include", *home.glob("targets/*/include")]
    return (home / "bin" / "nvcc").exists() and any((folder / "cuda_runtime_api.h").exists() for folder in folders)


def _wheel_folders(package: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def cuda_version(home: str) -> tuple[int, int]:
    """(major, minor) of the toolkit in `home`."""
    text = subprocess.run([f"{home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        raise RuntimeError(f"{home}/bin/nvcc --version names no release: {text.strip()!r}; is it NVIDIA's compiler?")
    return int(match.group(1)), int(match.group(2))


def link_cudart(home: str, folder: Path) -> list[str]:
    """Library folders for `-lcudart`. NVIDIA's wheels name the library libcudart.so.13 only: `folder` gets a link."""
    libraries = Path(home) / "lib"
    versioned = sorted(libraries.glob("libcudart.so.*"))
    if (libraries / "libcudart.so").exists() or not versioned:
        return [str(libraries)] if libraries.is_dir() else []
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(versioned[0])
    return [str(folder)]


def find_nccl() -> tuple[str, str] | None:
    """(include folder, library folder) of the NCCL wheel that PyTorch brought along, or None."""
    for folder in _wheel_folders("nvidia.nccl"):
        if (folder / "include" / "nccl.h").exists():
            return str(folder / "include"), str(folder / "lib")
    return None


def has_system_nccl(cuda_home: str) -> bool:
    """True if the compiler finds <nccl.h> by itself."""
    told = os.environ.get("CPATH", "").split(os.pathsep)
    folders = [*filter(None, told), f"{cuda_home}/include", "/usr/include", "/usr/local/include"]
    return any((Path(folder) / "nccl.h").exists() for folder in folders)


def cuda_obstacle(torch_version: str, torch_cuda: str | None, home: str | None) -> str | None:
    """The obstacle to building the CUDA part, and its remedy, as the end of a sentence; None: there is none.

    `torch_cuda` is PyTorch's CUDA version, such as "13.0", `home` what `find_cuda_home` gave.
    """
    if torch_cuda is None:
        return f"PyTorch {torch_version} has no CUDA: {cuda_torch_command()}"
    if home is None:
        return (
            f"PyTorch {torch_version} has CUDA {torch_cuda}, but there is no nvcc in CUDA_HOME, on PATH or in "
            f"/usr/local/cuda: {toolkit_command(torch_cuda)}"
        )
    major, minor = cuda_version(home)
    if major != int(torch_cuda.split(".")[0]):
        return (
            f"PyTorch {torch_version} has CUDA {torch_cuda}, but {home}/bin/nvcc is {major}.{minor}: "
            f"{toolkit_command(torch_cuda)}"
        )
    if find_nccl() is None and not has_system_nccl(home):
        return f"there is no nccl.h: {sys.executable} -m pip install nvidia-nccl-cu{major}"
    return None


def chosen_cuda_home(torch_version: str, torch_cuda: str | None) -> str | None:
    """The toolkit to build the CUDA part with; None where it is left out, and said so if PyTorch has CUDA.

    PATRICKSTAR_CUDA=0 leaves it out. With 1, and with an NVIDIA driver unless it is set, an obstacle ends the build:
    pip hides what a build prints, and whoever has a GPU would find out at the first step.
    """
    choice = os.environ.get("PATRICKSTAR_CUDA", "auto")
    if choice == "0":
        return None
    home = find_cuda_home(torch_cuda)
    obstacle = cuda_obstacle(torch_version, torch_cuda, home)
    if obstacle is None:
        return home
    if choice == "1" or has_nvidia_driver():
        reason = "PATRICKSTAR_CUDA=1" if choice == "1" else "this machine has an NVIDIA driver"
        sys.exit(f"{reason}, but {obstacle}; or set PATRICKSTAR_CUDA=0.")
    if torch_cuda is not None:
        print(f"patrickstar: building without CUDA, because {obstacle}.", file=sys.stderr)
    return None


def version_label(torch_version: str, torch_cuda: str | None) -> str:
    """The part of a wheel's version behind its plus sign: cpu or cu13."""
    return f"cu{torch_cuda.split('.')[0]}" if torch_cuda and chosen_cuda_home(torch_version, torch_cuda) else "cpu"


def architectures(torch_arch_flags: str | None, home: str) -> str:
    """TORCH_CUDA_ARCH_LIST for a machine without a visible GPU: what this PyTorch and this nvcc both support.

    `torch_arch_flags` is what PyTorch was compiled for, such as "sm_75 sm_80 sm_90 compute_120".
    """
    command = [f"{home}/bin/nvcc", "--list-gpu-arch"]
    known = set(re.findall(r"compute_(\d+)", subprocess.run(command, capture_output=True, text=True).stdout))
    wanted = {arch for arch in re.findall(r"sm_(\d+)\b", torch_arch_flags or "") if arch in known}
    if not wanted:
        return _FALLBACK_ARCHITECTURES
    return ";".join(f"{arch[:-1]}.{arch[-1]}" for arch in sorted(wanted, key=int)) + "+PTX"


def gencode(architectures: str) -> list[str]:
    """nvcc's arguments for TORCH_CUDA_ARCH_LIST, such as "8.0;9.0+PTX"; +PTX adds code for later GPUs."""
    result = []
    for name in filter(None, re.split(r"[;, ]+", architectures)):
        found = re.fullmatch(r"(\d+)\.(\d+)(a?)(\+PTX)?", name)
        if found is None:
            sys.exit(f'TORCH_CUDA_ARCH_LIST has {name!r}; give numbers, such as "8.0;9.0+PTX"')
        number = "".join(found.group(1, 2, 3))
        result.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if found.group(4):
            result.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return result

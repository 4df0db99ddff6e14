"""Compiles and links the CUDA part of the extension on a machine without a GPU.

Headers and libraries come from wheels pinned in build_backend/patrickstar_pins.py: a CUDA PyTorch (headers and c10),
its NCCL, and NVIDIA's compiler. They are downloaded once into .cache/cuda. The core and its shim for that PyTorch are
compiled as by setup.py. The core's link allows no undefined symbol except those of the Python interpreter.
Kernels are compiled for all architectures of that PyTorch, or for TORCH_CUDA_ARCH_LIST, such as "7.5;12.0". The build
lies in .cache/cuda/build; the in-place build is untouched.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "build_backend"), str(ROOT / "tools")]

import fetching  # noqa: E402
import patrickstar_ninja as ninja  # noqa: E402
import patrickstar_recipe as recipe  # noqa: E402
from patrickstar_pins import (  # noqa: E402
    CUDA_ARCHITECTURES,
    CUDA_NCCL,
    CUDA_TOOLKIT,
    CUDA_TOOLKIT_MAJOR,
    CUDA_TORCH,
)

from patrickstar.torch_shim import compiling  # noqa: E402

BUILD = fetching.CACHE / "cuda" / "build"
ARCHITECTURES = os.environ.get("TORCH_CUDA_ARCH_LIST") or CUDA_ARCHITECTURES


def dynamic_symbols(file: Path, kind: str) -> set[str]:
    """Returns the names in the dynamic symbol table; `kind` is --defined-only or --undefined-only."""
    done = subprocess.run(["nm", "-D", kind, "--format=posix", str(file)], capture_output=True, text=True, check=True)
    return {line.split()[0].partition("@")[0] for line in done.stdout.splitlines() if line.strip()}


def python_library() -> Path:
    """Makes a shared library with every symbol that this Python offers to extensions.

    A statically linked interpreter has no library to link against.
    """
    shared = Path(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or "")
    exporter = shared if shared.is_file() and ".so" in shared.name else Path(sys.executable).resolve()
    names = sorted(name for name in dynamic_symbols(exporter, "--defined-only") if name.startswith(("Py", "_Py")))
    assembly = BUILD / "python_symbols.s"
    symbol = ".globl {0}\n.type {0},@object\n.size {0},8\n{0}: .quad 0\n"
    labels = "".join(symbol.format(name) for name in names)
    assembly.write_text(f'.data\n{labels}.section .note.GNU-stack,"",@progbits\n')
    library = BUILD / "libpython_symbols.so"
    command = ["c++", "-shared", "-nostdlib", "-Wl,-soname,the-interpreter", "-o", str(library), str(assembly)]
    subprocess.run(command, check=True)
    return library


def plan_build(python_symbols: Path, torch_folder: Path) -> ninja.Build:
    """The core and the shim, from the wheels."""
    import nanobind

    cudart = min((fetching.TOOLKIT / "lib").glob("libcudart.so.*"))
    libraries = [str(python_symbols), str(fetching.CUDA / "nvidia/nccl/lib/libnccl.so.2"), str(cudart)]
    includes = [str(fetching.CUDA / "nvidia" / "nccl" / "include"), str(fetching.TOOLKIT / "include")]
    cuda = ninja.Cuda(str(fetching.TOOLKIT), recipe.gencode(ARCHITECTURES), includes, libraries)
    torch = compiling.Torch(CUDA_TORCH.partition("==")[2], torch_folder, f"{CUDA_TOOLKIT_MAJOR}.0")
    return ninja.Build(
        root=ROOT,
        folder=BUILD,
        core=BUILD / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}",
        nanobind=Path(nanobind.__file__).parent,
        compiler=os.environ.get("CXX", "c++"),
        cuda=cuda,
        shims=[(torch, BUILD / compiling.file_name(torch))],
        link_flags=["-Wl,--no-undefined", "-Wl,--as-needed"],
    )


def report(library: Path, seconds: float) -> None:
    """Prints the result of the build."""
    sources = recipe.sources(ROOT, with_cuda=True)
    needed = subprocess.run(["objdump", "-p", str(library)], capture_output=True, text=True, check=True).stdout
    names = [line.split()[1] for line in needed.splitlines() if line.strip().startswith("NEEDED")]
    undefined = dynamic_symbols(library, "--undefined-only")
    cuda = sum(name.startswith("cuda") for name in undefined)
    nccl = sum(name.startswith("nccl") for name in undefined)
    print(f"check-cuda: {len(sources)} sources, {sum(name.endswith('.cu') for name in sources)} of them .cu, against")
    print(f"  {CUDA_TORCH}, {CUDA_NCCL}, {CUDA_TOOLKIT[0]}, for {ARCHITECTURES}")
    print(f"  {library.relative_to(ROOT)}: {library.stat().st_size / 1e6:.1f} MB in {seconds:.0f} s")
    print(f"  uses {cuda} functions of the CUDA runtime, {nccl} of NCCL; needs {', '.join(names)}")


def main() -> None:
    """Fetches, compiles, links and reports."""
    BUILD.mkdir(parents=True, exist_ok=True)
    fetching.fetch_cuda()
    torch = fetching.fetch_torch(CUDA_TORCH.partition("==")[2])
    started = time.monotonic()
    build = plan_build(python_library(), torch)
    if subprocess.run(ninja.ninja_command(ninja.write(build))).returncode != 0:
        sys.exit("check-cuda: the CUDA part does not build; see the first error above")
    report(build.core, time.monotonic() - started)


if __name__ == "__main__":
    main()

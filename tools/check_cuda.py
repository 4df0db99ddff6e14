"""Compiles and links the CUDA part of the extension on a machine without a GPU.

Headers and libraries come from wheels pinned in build_backend/patrickstar_pins.py: a CUDA PyTorch (headers and c10),
its NCCL, and NVIDIA's compiler. They are downloaded once into .cache/cuda. Every source of csrc is compiled as by
setup.py, with PATRICKSTAR_WITH_CUDA. The link allows no undefined symbol except those of the Python interpreter.
Kernels are compiled for all architectures of that PyTorch, or for TORCH_CUDA_ARCH_LIST, such as "7.5;12.0". The build
lies in .cache/cuda/build; the in-place build is untouched.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))

import patrickstar_recipe as recipe  # noqa: E402
from patrickstar_pins import CUDA_NCCL, CUDA_TOOLKIT, CUDA_TORCH  # noqa: E402

CACHE = ROOT / ".cache" / "cuda"
BUILD = CACHE / "build"
WHEELS = CACHE / f"wheels-{sysconfig.get_config_var('SOABI')}"
TOOLKIT = WHEELS / "nvidia" / "cu13"

# Files kept of each wheel. Only c10: a use of any library above it must fail to link, since csrc must not need ATen.
KEPT = {
    CUDA_TORCH: ("torch/include/", "torch/lib/libc10.so", "torch/lib/libc10_cuda.so"),
    CUDA_NCCL: ("nvidia/nccl/",),
    **dict.fromkeys(CUDA_TOOLKIT, ("nvidia/cu13/",)),
}
# torch.utils.cpp_extension.COMMON_NVCC_FLAGS, and the oldest C++ standard that a supported PyTorch needs.
TORCH_NVCC_FLAGS = [
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
]
STANDARD = "-std=c++17"
ARCHITECTURES = "7.5;8.0;8.6;9.0;10.0;12.0"  # those of the pinned PyTorch


def architectures() -> list[str]:
    """The GPU architectures of $TORCH_CUDA_ARCH_LIST or of the pinned PyTorch, without dots, as nvcc writes them."""
    told = os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHITECTURES
    return [name.removesuffix("+PTX").replace(".", "") for name in told.replace(" ", ";").split(";") if name]


def fetch(requirement: str) -> None:
    """Downloads a wheel and keeps the needed files, unless they exist."""
    marker = WHEELS / f"{requirement}.complete"
    if marker.exists():
        return
    started = time.monotonic()
    download = WHEELS / "download"
    shutil.rmtree(download, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    if subprocess.run([*command, "-d", str(download), requirement]).returncode != 0:
        sys.exit(f"check-cuda: {requirement} could not be downloaded; see pip's message")
    (wheel,) = download.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith(KEPT[requirement]) and not member.is_dir():
                path = Path(archive.extract(member, WHEELS))
                path.chmod(0o755 if member.external_attr >> 16 & 0o111 else 0o644)
    print(
        f"fetched {requirement}: {wheel.stat().st_size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s", flush=True
    )
    shutil.rmtree(download)
    marker.touch()


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


def quote(parts: list[str]) -> str:
    """Quotes a command for a ninja file."""
    return shlex.join(parts).replace("$", "$$")


def write_ninja(python_symbols: Path) -> Path:
    """Writes the ninja file that compiles and links all sources; returns the shared library that it makes."""
    folders = [WHEELS / "torch" / "include", WHEELS / "nvidia" / "nccl" / "include", TOOLKIT / "include"]
    folders.append(Path(sysconfig.get_path("include")))
    includes = [f"-I{ROOT / 'csrc'}", *(part for folder in folders for part in ("-isystem", str(folder)))]
    version = CUDA_TORCH.partition("==")[2]
    macros = [f"-D{name}={value}" for name, value in [recipe.CUDA_MACRO, ("TORCH_EXTENSION_NAME", "_C")]]
    macros.append(f'-DPATRICKSTAR_TORCH_VERSION="{version}"')
    gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures()]
    gencode.append(f"-gencode=arch=compute_{architectures()[-1]},code=compute_{architectures()[-1]}")
    nvcc_flags = [*TORCH_NVCC_FLAGS, *recipe.NVCC_FLAGS, *gencode, "-Xcompiler", "-fPIC", "--threads", "2"]
    library = BUILD / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    objects = {source: BUILD / f"{source}.o" for source in recipe.sources(ROOT, with_cuda=True)}
    cxx = [os.environ.get("CXX", "c++"), *includes, *macros, *recipe.CXX_FLAGS, STANDARD, "-fPIC"]
    # Kernels must need neither PyTorch nor Python, so their headers are not on the path.
    nvcc = [str(TOOLKIT / "bin" / "nvcc"), includes[0], *macros, *nvcc_flags, STANDARD]
    libraries = [WHEELS / "torch/lib/libc10.so", WHEELS / "torch/lib/libc10_cuda.so", python_symbols]
    libraries += [WHEELS / "nvidia/nccl/lib/libnccl.so.2", *sorted((TOOLKIT / "lib").glob("libcudart.so.*"))]
    link = [*shlex.split(cxx[0]), "-shared", *recipe.LINK_FLAGS, "-Wl,--no-undefined", "-Wl,--as-needed"]
    lines = [
        "ninja_required_version = 1.3",
        f"rule cxx\n  command = {quote(cxx)} -MMD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc",
        "  description = c++ $name",
        f"rule nvcc\n  command = {quote(nvcc)} -MD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc",
        "  description = nvcc $name",
        f"rule link\n  command = {quote(link)} -o $out $in {quote([str(path) for path in libraries])}",
        "  description = link $out",
    ]
    for source, target in objects.items():
        rule = "nvcc" if source.endswith(".cu") else "cxx"
        lines.append(f"build {target}: {rule} {ROOT / source}\n  name = {source}")
    lines.append(f"build {library}: link {' '.join(map(str, objects.values()))} | {' '.join(map(str, libraries))}")
    (BUILD / "build.ninja").write_text("\n".join(lines) + "\n")
    return library


def report(library: Path, seconds: float) -> None:
    """Prints the result of the build."""
    sources = recipe.sources(ROOT, with_cuda=True)
    needed = subprocess.run(["objdump", "-p", str(library)], capture_output=True, text=True, check=True).stdout
    names = [line.split()[1] for line in needed.splitlines() if line.strip().startswith("NEEDED")]
    undefined = dynamic_symbols(library, "--undefined-only")
    cuda = sum(name.startswith("cuda") for name in undefined)
    nccl = sum(name.startswith("nccl") for name in undefined)
    print(f"check-cuda: {len(sources)} sources, {sum(name.endswith('.cu') for name in sources)} of them .cu, against")
    print(f"  {CUDA_TORCH}, {CUDA_NCCL}, {CUDA_TOOLKIT[0]}, for sm_{', sm_'.join(architectures())}")
    print(f"  {library.relative_to(ROOT)}: {library.stat().st_size / 1e6:.1f} MB in {seconds:.0f} s")
    print(f"  uses {cuda} functions of the CUDA runtime, {nccl} of NCCL; needs {', '.join(names)}")


def main() -> None:
    """Fetches, compiles, links and reports."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    for requirement in KEPT:
        fetch(requirement)
    started = time.monotonic()
    library = write_ninja(python_library())
    if subprocess.run(["ninja", "-C", str(BUILD), str(library)]).returncode != 0:
        sys.exit("check-cuda: the CUDA part does not build; see the first error above")
    report(library, time.monotonic() - started)


if __name__ == "__main__":
    main()

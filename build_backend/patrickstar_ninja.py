"""The ninja file of the extension: the core, compiled without PyTorch, and shims for versions of PyTorch.

Sources of a folder of csrc are compiled together in units of some thousand lines, since headers take most of a small
file's time.
The shim of a version of PyTorch is one command (patrickstar/torch_shim/compiling.py).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import patrickstar_recipe as recipe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from patrickstar.torch_shim import compiling  # noqa: E402

# Lines of a unit. Bindings take more time per line, and compile with -O1: registration runs once.
UNIT_LINES = 2000
BINDING_LINES = 700


@dataclass(frozen=True)
class Cuda:
    """The toolkit that compiles the CUDA part."""

    home: str
    gencode: list[str]
    include_folders: list[str]
    libraries: list[str]
    """Arguments of the linker for CUDA's runtime and NCCL."""


@dataclass
class Build:
    """Inputs and outputs of one build."""

    root: Path
    folder: Path
    """Holds objects, units and build.ninja."""
    core: Path
    """The extension module."""
    nanobind: Path
    """The package's folder: headers, and sources that are compiled with the core."""
    compiler: str
    cuda: Cuda | None = None
    shims: list[tuple[compiling.Torch, Path]] = field(default_factory=list)
    link_flags: list[str] = field(default_factory=list)


def units(sources: Iterable[str], root: Path) -> dict[str, list[str]]:
    """Units by name, such as "engine_2" or "bind_registers_1", with their sources."""
    open_units: dict[str, tuple[int, int]] = {}  # of a folder: number and lines of the last unit
    result: dict[str, list[str]] = {}
    for source in sources:
        room, name = Path(source).parts[1], Path(source).name
        if recipe.ISA_FILE.fullmatch(name):
            result[f"{room}_{Path(name).stem}"] = [source]
            continue
        kind, most = room, UNIT_LINES
        if name.startswith(("cuda_", "nccl_")):
            kind = f"{room}_cuda"
        elif name.startswith("register_"):
            kind, most = f"{room}_registers", BINDING_LINES
        lines = (root / source).read_text(encoding="utf-8").count("\n")
        number, filled = open_units.get(kind, (1, 0))
        if filled and filled + lines > most:
            number, filled = number + 1, 0
        open_units[kind] = number, filled + lines
        result.setdefault(f"{kind}_{number}", []).append(source)
    return result


def quote(parts: Iterable[str]) -> str:
    """A command for a ninja file."""
    return shlex.join(parts).replace("$", "$$")


def write(build: Build) -> Path:
    """Writes units and build.ninja into the build's folder; returns the ninja file."""
    build.folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{build.root / 'csrc'}"]
    system = [
        str(build.nanobind / "include"),
        sysconfig.get_path("include"),
        *(build.cuda.include_folders if build.cuda else []),
    ]
    isystem = [part for folder in system for part in ("-isystem", folder)]
    macros = [f"-D{name}={value}" for name, value in [recipe.CUDA_MACRO] if build.cuda]
    cxx = [*shlex.split(build.compiler), *includes, *isystem, *macros, *recipe.CXX_FLAGS, "-std=c++17", "-fPIC"]
    libraries = build.cuda.libraries if build.cuda else []
    link = [*shlex.split(build.compiler), "-shared", *recipe.LINK_FLAGS, *build.link_flags]
    depends = "-MMD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc\n  description = $name"
    lines = [
        "ninja_required_version = 1.5",
        f"builddir = {build.folder}",  # holds the log
        f"rule cxx\n  command = {quote(cxx)} $further {depends}",
        f"rule link\n  command = {quote(link)} -o $out $in {quote(['-ldl', *libraries])}\n  description = $name",
        "rule shim\n  command = $command\n  description = $name",
    ]
    sources = recipe.sources(build.root, with_cuda=build.cuda is not None)
    objects = [build.folder / "nanobind.o"]
    further = shlex.join([f"-I{build.nanobind}/ext/robin_map/include", *recipe.NANOBIND_FLAGS])
    lines.append(f"build {objects[0]}: cxx {build.nanobind}/src/nb_combined.cpp")
    lines.append(f"  name = nanobind\n  further = {further}")
    for name, members in units([source for source in sources if source.endswith(".cpp")], build.root).items():
        unit = build.folder / "units" / f"{name}.cpp"
        _write_if_changed(unit, "".join(f'#include "{source.removeprefix("csrc/")}"\n' for source in members))
        objects.append(build.folder / f"{name}.o")
        further = f"\n  further = {recipe.REGISTER_FLAG}" if "_registers_" in name else ""
        shown = members[0] if len(members) == 1 else f"{name} ({len(members)} files)"
        lines.append(f"build {objects[-1]}: cxx {unit}\n  name = {shown}{further}")
    if build.cuda:
        # Kernels need neither PyTorch nor Python, so their headers are not on the path.
        nvcc = [f"{build.cuda.home}/bin/nvcc", *includes, *macros, *recipe.NVCC_FLAGS, *build.cuda.gencode]
        nvcc += ["-std=c++17", "-Xcompiler", "-fPIC", "-ccbin", build.compiler]
        lines.append(f"rule nvcc\n  command = {quote(nvcc)} {depends.replace('-MMD', '-MD')}")
        for source in (source for source in sources if source.endswith(".cu")):
            objects.append(build.folder / f"{source}.o")
            lines.append(f"build {objects[-1]}: nvcc {build.root / source}\n  name = {source}")
    lines.append(f"build {build.core}: link {' '.join(map(str, objects))}\n  name = {build.core.name}")
    csrc = build.root / "csrc"
    read = [csrc / name for name in compiling.FILES]
    for torch, target in build.shims:
        command = compiling.compile_command(build.compiler, csrc, torch, target, recipe.SHIM_FLAGS)
        lines.append(f"build {target}: shim | {' '.join(map(str, read))}\n  command = {quote(command)}")
        lines.append(f"  name = {target.name}")
    file = build.folder / "build.ninja"
    _write_if_changed(file, "\n".join(lines) + "\n")
    return file


def _write_if_changed(file: Path, text: str) -> None:
    if file.exists() and file.read_text(encoding="utf-8") == text:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def ninja_command(file: Path) -> list[str]:
    """The command that builds everything; prints a line for each step, whole commands with V=1."""
    program = "ninja"
    with contextlib.suppress(ImportError):
        import ninja  # another version on PATH would drop the log of this one and compile everything again

        program = str(Path(ninja.BIN_DIR) / "ninja")
    jobs = os.environ.get("MAX_JOBS")
    verbose = ["-v"] if os.environ.get("V") == "1" else []
    return [program, "-f", str(file), *(["-j", jobs] if jobs else []), *verbose]

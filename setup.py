"""Builds patrickstar._C and its shim: with CUDA and NCCL when PyTorch has CUDA and nvcc is there, else without.

Environment: PATRICKSTAR_CUDA=0 leaves the CUDA part out, =1 demands it, as an NVIDIA driver does;
TORCH_CUDA_ARCH_LIST, CUDA_HOME, CXX and MAX_JOBS as usual; PATRICKSTAR_TORCH: the folder `torch` to build for, instead
of the installed one; PATRICKSTAR_SHIMS: folders of further versions to compile shims for, with colons between; V=1
prints whole commands. `python setup.py build_ext --inplace` (make build) recompiles what changed; a wheel is made of
the same objects.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))

import patrickstar_ninja as ninja  # noqa: E402
import patrickstar_recipe as recipe  # noqa: E402
from patrickstar_build import expose_torch, torch_folder, torch_versions  # noqa: E402
from patrickstar_commands import torch_command  # noqa: E402
from patrickstar_pins import MINIMUM_TORCH  # noqa: E402

from patrickstar.torch_shim import compiling  # noqa: E402


def prepare_cuda(version: str, cuda: str | None) -> bool:
    """Whether to build the CUDA part; sets what PyTorch's build reads from the environment."""
    cuda_home = recipe.chosen_cuda_home(version, cuda)
    if cuda_home is None:
        return False
    os.environ["CUDA_HOME"] = cuda_home
    if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        import torch

        flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
        here = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
        visible = ";".join(f"{major}.{minor}" for major, minor in sorted(here))
        os.environ["TORCH_CUDA_ARCH_LIST"] = visible or recipe.architectures(flags, cuda_home)
    return True


def cuda_part() -> ninja.Cuda:
    """The toolkit of $CUDA_HOME, NCCL, and code for $TORCH_CUDA_ARCH_LIST."""
    home = os.environ["CUDA_HOME"]
    nccl = recipe.find_nccl()
    folders = recipe.link_cudart(home, ROOT / "build" / "cudart") + ([nccl[1]] if nccl else [])
    libraries = [f"-L{folder}" for folder in [*folders, f"{home}/lib64"]]
    # Beside this package in site-packages; PyTorch, imported first, has loaded it in any case.
    libraries += ["-lcudart", "-l:libnccl.so.2", "-Wl,-rpath,$ORIGIN/../nvidia/nccl/lib"]
    includes = [f"{home}/include", *([nccl[0]] if nccl else [])]
    return ninja.Cuda(home, recipe.gencode(os.environ["TORCH_CUDA_ARCH_LIST"]), includes, libraries)


def shims(cuda: str | None) -> dict[str, compiling.Torch]:
    """Versions of PyTorch by the name of their shim: the one that the build is for, and those whose folders
    PATRICKSTAR_SHIMS lists. Of two with the same name the first counts.
    """
    has_gloo = True
    if "PATRICKSTAR_TORCH" not in os.environ:
        import torch

        has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    further = filter(None, os.environ.get("PATRICKSTAR_SHIMS", "").split(os.pathsep))
    found: dict[str, compiling.Torch] = {}
    for folder in [torch_folder(), *map(Path, further)]:
        each = compiling.Torch(torch_versions(folder)[0], folder, cuda, has_gloo or bool(found))
        found.setdefault(compiling.file_name(each), each)
    return found


def choose_compiler() -> None:
    """$CXX, else one of PATH or of the system; the first that links the C++ library as PyTorch does."""
    told = os.environ.get("CXX")
    names = dict.fromkeys(filter(None, [told, "c++", "g++", "/usr/bin/g++"]))
    found = [name for name in names if shutil.which(name)]
    if told and told not in found:
        sys.exit(f"CXX is {told}, and there is no program of that name (no arguments here); unset or correct it")
    if not found:
        sys.exit("PatrickStar is compiled and there is no C++ compiler; on Debian or Ubuntu: apt-get install g++")
    usable = next(filter(recipe.shares_libstdcxx, found), None)
    if usable is None:
        sys.exit(
            f"{found[0]} cannot link a library that uses the shared libstdc++, as PyTorch does; "
            "set CXX to a compiler that can, on Debian or Ubuntu: apt-get install g++"
        )
    if usable != found[0]:
        print(f"patrickstar: compiling with {usable}, because {found[0]} links no shared libstdc++.", file=sys.stderr)
    os.environ["CXX"] = usable


def check_tools(version: str) -> None:
    """Exits with a remedy when PyTorch is too old or there is no compiler."""
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < MINIMUM_TORCH:
        sys.exit(
            f"PatrickStar needs PyTorch {'.'.join(map(str, MINIMUM_TORCH))} or newer, and {sys.prefix} has "
            f"{version}; upgrade it: {torch_command()}"
        )
    choose_compiler()


def put(built: Path, folder: Path) -> None:
    """Copies a library into a folder, unless it is there. A process that has loaded the former one keeps that."""
    target = folder / built.name
    if target.exists() and target.stat().st_mtime == built.stat().st_mtime:
        return
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    shutil.copy2(built, unfinished)
    unfinished.replace(target)


class Build(build_ext):
    """Compiles the core and its shims with ninja, and copies them into the package."""

    def run(self) -> None:
        """Builds into build_lib, or in place."""
        expose_torch()
        import nanobind

        version, cuda = torch_versions()
        check_tools(version)
        with_cuda = prepare_cuda(version, cuda)
        folder = Path(f"{self.build_temp}{'-cuda' * with_cuda}").resolve()
        build = ninja.Build(
            root=ROOT,
            folder=folder,
            core=folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}",
            nanobind=Path(nanobind.__file__).parent,
            compiler=os.environ["CXX"],
            cuda=cuda_part() if with_cuda else None,
            shims=[(each, folder / name) for name, each in shims(cuda if with_cuda else None).items()],
        )
        if subprocess.run(ninja.ninja_command(ninja.write(build))).returncode != 0:
            sys.exit("patrickstar: the extension does not compile; see the first error above")
        package = (ROOT if self.inplace else Path(self.build_lib).resolve()) / "patrickstar"
        put(build.core, package)
        for _, shim in build.shims:
            put(shim, package / "torch_shim")
        if not self.inplace:
            self.pack_shim_sources(package / "torch_shim" / "csrc")

    def pack_shim_sources(self, folder: Path) -> None:
        """Copies what a shim for another PyTorch is compiled from."""
        for name in compiling.FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / "csrc" / name, folder / name)


# The sources are the ninja file's; this makes wheels platform wheels and runs build_ext.
setup(ext_modules=[Extension("patrickstar._C", [])], cmdclass={"build_ext": Build})

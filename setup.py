"""Builds patrickstar._C: with CUDA and NCCL when PyTorch has CUDA and nvcc is there, else without.

Environment: PATRICKSTAR_CUDA=0 leaves the CUDA part out, =1 demands it; TORCH_CUDA_ARCH_LIST, CUDA_HOME, CXX and
MAX_JOBS as usual; V=1 prints whole commands. `python setup.py build_ext --inplace` (make build) recompiles what
changed.
"""

import contextlib
import os
import shutil
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))

import patrickstar_recipe as recipe  # noqa: E402
from patrickstar_build import expose_torch, torch_command  # noqa: E402
from patrickstar_output import short_lines  # noqa: E402
from patrickstar_pins import MINIMUM_TORCH  # noqa: E402

# These say what the package is without compiling it, so they work without PyTorch. An editable install finds the
# extension in place (build_backend/patrickstar_build.py).
METADATA_COMMANDS = {"egg_info", "dist_info", "editable_wheel", "sdist", "--version", "--name", "clean"}
COMPILING_COMMANDS = {"bdist_wheel", "build_ext"}


def prepare_cuda(torch) -> bool:
    """Whether to build the CUDA part; sets what PyTorch's build reads from the environment."""
    cuda_home = recipe.chosen_cuda_home(torch.__version__, torch.version.cuda)
    if cuda_home is None:
        return False
    os.environ["CUDA_HOME"] = cuda_home
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and torch.cuda.device_count() == 0:
        flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
        os.environ["TORCH_CUDA_ARCH_LIST"] = recipe.architectures(flags, cuda_home)
    return True


def make_extension(torch):
    with_cuda = prepare_cuda(torch)
    from torch.utils.cpp_extension import CppExtension, CUDAExtension  # reads CUDA_HOME when imported

    sources = recipe.sources(ROOT, with_cuda=with_cuda)
    # In the flags, so that another PyTorch at the same place recompiles everything.
    macros = [("PATRICKSTAR_TORCH_VERSION", f'"{torch.__version__}"')]
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        macros.append(recipe.C10D_MACRO)
    compile_args = {"cxx": recipe.CXX_FLAGS}
    include_dirs, library_dirs, link_args = [str(ROOT / "csrc")], [], list(recipe.LINK_FLAGS)
    if with_cuda:
        macros.append(recipe.CUDA_MACRO)
        compile_args["nvcc"] = recipe.NVCC_FLAGS
        library_dirs += recipe.link_cudart(os.environ["CUDA_HOME"], ROOT / "build" / "cudart")
        nccl = recipe.find_nccl()
        if nccl is not None:
            include_dirs.append(nccl[0])
            library_dirs.append(nccl[1])
        # Beside this package in site-packages; PyTorch, imported first, has loaded it in any case.
        link_args += ["-l:libnccl.so.2", "-Wl,-rpath,$ORIGIN/../nvidia/nccl/lib"]
    make = CUDAExtension if with_cuda else CppExtension
    return make(
        "patrickstar._C",
        sources,
        include_dirs=include_dirs,
        library_dirs=library_dirs,
        define_macros=macros,
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


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


def check_tools(torch) -> None:
    """Exits with a remedy when PyTorch is too old or there is no compiler; puts ninja's wheel first on PATH."""
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < MINIMUM_TORCH:
        sys.exit(
            f"PatrickStar needs PyTorch {'.'.join(map(str, MINIMUM_TORCH))} or newer, and {sys.prefix} has "
            f"{torch.__version__}; upgrade it: {torch_command()}"
        )
    choose_compiler()
    with contextlib.suppress(ImportError):  # without it PATH's; with none PyTorch says that it compiles one by one
        import ninja

        # First, whoever builds: a ninja of another version drops the log of this one, and compiles everything again.
        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ["PATH"]])


def build_options() -> dict:
    if METADATA_COMMANDS.intersection(sys.argv[1:]) and not COMPILING_COMMANDS.intersection(sys.argv[1:]):
        return {}
    expose_torch()
    import torch

    check_tools(torch)
    extension = make_extension(torch)
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        def build_extensions(self) -> None:
            try:
                with short_lines(ROOT / "csrc"):
                    super().build_extensions()
            except RuntimeError as error:
                if "Error compiling" not in str(error):
                    raise
                sys.exit("patrickstar: the extension does not compile; see the first error above")

    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}}


setup(**build_options())

"""In-tree PEP 517 backend: setuptools, with the installing environment's own PyTorch in sight.

pip builds in an empty environment of its own, and the extension's shim is compiled against the PyTorch that will
import it. So this backend puts the site-packages of the environment that pip installs into back on the path (at its
end, so that the build requirements win) before setuptools runs. Source distributions need no PyTorch.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from patrickstar_commands import torch_command


def _environment_site_packages() -> list[str]:
    """Folders that hold the packages of the environment pip installs into, in Python's own order."""
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages([sys.prefix])]
    sees_base = sys.prefix == sys.base_prefix
    config = Path(sys.prefix, "pyvenv.cfg")
    if config.is_file():
        settings = dict(line.split("=", 1) for line in config.read_text(encoding="utf-8").splitlines() if "=" in line)
        values = {key.strip(): value.strip().lower() for key, value in settings.items()}
        sees_base = values.get("include-system-site-packages") == "true"
    if sees_base:
        if not os.environ.get("PYTHONNOUSERSITE"):
            paths.append(site.getusersitepackages())
        paths += site.getsitepackages([sys.base_prefix])
    return [path for path in dict.fromkeys(paths) if path and os.path.isdir(path)]


def expose_torch() -> None:
    """Makes the environment's PyTorch importable, or exits with one sentence that names the remedy."""
    folders = _environment_site_packages()
    sys.path += [path for path in folders if path not in sys.path]
    if importlib.util.find_spec("torch") is None:
        for path in folders:  # a PyTorch that a .pth file points to
            site.addsitedir(path)
    if importlib.util.find_spec("torch") is not None:
        return
    remedy = f"install it first: {torch_command()}"
    if os.environ.get("UV"):  # uv's build environments do not show which environment they build for
        remedy = f"with uv, install it first and build beside it: uv pip install --no-build-isolation {Path.cwd()}"
    sys.exit(f"PatrickStar is compiled against the PyTorch it will run with, and {sys.prefix} has none; {remedy}")


def torch_folder() -> Path:
    """The folder `torch` that the build is for: PATRICKSTAR_TORCH, else the installed one; after `expose_torch`."""
    told = os.environ.get("PATRICKSTAR_TORCH")
    return Path(told) if told else Path(importlib.util.find_spec("torch").origin).parent


def torch_versions(folder: Path | None = None) -> tuple[str, str | None]:
    """The version of the PyTorch in `folder` (default: `torch_folder()`) and of its CUDA (None: it has none), without
    importing it.
    """
    facts = runpy.run_path(str((folder or torch_folder()) / "version.py"))
    return facts["__version__"], facts["cuda"]


def _backend():
    from setuptools import build_meta

    return build_meta


def _labelled(config_settings):
    """The settings, with what is built in the version: 0.7.0+cpu."""
    from patrickstar_recipe import version_label

    settings = dict(config_settings or {})
    told = settings.get("--global-option") or []
    told = told.split() if isinstance(told, str) else told
    settings["--global-option"] = [*told, "egg_info", f"--tag-build=+{version_label(*torch_versions())}"]
    return settings


def _build_in_place():
    # Not in setuptools' editable_wheel, which compiles everything again, in a folder of its own.
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    if subprocess.run(command).returncode != 0:
        sys.exit("patrickstar: the extension was not built; see the first error above")


def get_requires_for_build_wheel(config_settings=None):
    expose_torch()  # before anything is downloaded
    return ["ninja", "nanobind>=3.1,<4"]


def get_requires_for_build_editable(config_settings=None):
    expose_torch()
    return ["ninja", "nanobind>=3.1,<4"]


def get_requires_for_build_sdist(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    expose_torch()
    return _backend().prepare_metadata_for_build_wheel(metadata_directory, _labelled(config_settings))


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    return _backend().prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    expose_torch()
    # setuptools packs whatever lies in build/lib*, also modules that are gone from the tree. The objects in build/temp*
    # stay: ninja knows which of them are stale.
    for folder in Path("build").glob("lib*"):
        shutil.rmtree(folder)
    return _backend().build_wheel(wheel_directory, _labelled(config_settings), metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    expose_torch()
    _build_in_place()
    return _backend().build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    return _backend().build_sdist(sdist_directory, config_settings)

"""Runs Python with an existing PyTorch, or makes a virtual environment with one; used by the Makefile.

    python3 tools/environment.py --extras build,test -- -m pytest

Candidates in order: the active virtual environment or this python3, if it has PyTorch; .venv of this repository; a new
.venv. Missing requirements of the extras (pyproject.toml) are installed with PyTorch pinned to the existing version, so
that no second one is downloaded. If Python's own packages must not be changed (Debian, or no write permission), they go
into a .venv that sees those packages. --editable also installs this checkout, so that `patrickstar` and scripts find
it. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build_backend"))

from patrickstar_commands import has_nvidia_driver  # noqa: E402
from patrickstar_pins import CPU_INDEX, MINIMUM_PYTHON, MINIMUM_TORCH, TORCH  # noqa: E402

VENV = ROOT / ".venv"

_TORCH_VERSION = "import importlib.metadata as m; print(m.version('torch'))"
_MAY_INSTALL = """
import os, sys, sysconfig
managed = os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
sys.exit((managed and sys.prefix == sys.base_prefix) or not os.access(sysconfig.get_path("purelib"), os.W_OK))
"""
_MISSING = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
for text in sys.argv[1:]:
    requirement = Requirement(text)
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found is None or not requirement.specifier.contains(found, prereleases=True):
        print(text)
"""
_PACKAGE_FOLDERS = """
import sys
print(*(folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))), sep="\\n")
"""
_EXTRAS = """
import json, sys
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
print(json.dumps({"": project["dependencies"], **project["optional-dependencies"]}))
"""
# Prints "current" or "stale" for an editable install of the checkout; else the folder of an installed package, if any.
_INSTALLED = """
import importlib.metadata, json, pathlib, sys
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
root = pathlib.Path(sys.argv[1])
project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
for found in importlib.metadata.distributions(name=project["name"]):
    folder = pathlib.Path(found.locate_file(""))
    if folder == root:
        continue  # what a build has left in the checkout
    source = json.loads(found.read_text("direct_url.json") or "{}")
    if source.get("url") != root.as_uri() or not source.get("dir_info", {}).get("editable"):
        print(source.get("url", folder))
    else:
        scripts = {entry.name: entry.value for entry in found.entry_points if entry.group == "console_scripts"}
        is_current = scripts == project["scripts"] and found.version == project["version"]
        print("current" if is_current else "stale")
    break
"""


def say(text: str) -> None:
    """Prints progress to standard error; standard output belongs to the command."""
    print(f"environment: {text}", file=sys.stderr, flush=True)


def output(python: str, code: str, *arguments: str) -> str | None:
    """Returns the output of `code` run by `python`; None if it fails."""
    done = subprocess.run([python, "-c", code, *arguments], capture_output=True, text=True, cwd="/")
    return done.stdout.strip() if done.returncode == 0 else None


def torch_version(python: str) -> str | None:
    """Returns the version of `python`'s PyTorch; None if it is missing or too old."""
    version = output(python, _TORCH_VERSION)
    if version and tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < MINIMUM_TORCH:
        say(f"{python} has PyTorch {version}, which is too old: passing it over")
        return None
    return version


def usable_python() -> str:
    """Returns a Python new enough for an environment: this one, else a newer one on PATH."""
    if sys.version_info >= MINIMUM_PYTHON:
        return sys.executable
    for minor in range(14, MINIMUM_PYTHON[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found:
            return found
    sys.exit(f"PatrickStar needs Python {'.'.join(map(str, MINIMUM_PYTHON))} or newer, {sys.executable} is older")


def make_venv(python: str, *, see_packages: bool) -> str:
    """Makes .venv and returns its Python. `see_packages`: the environment sees the packages of `python`."""
    say(f"making {VENV} with {python}")
    command = [python, "-m", "venv", "--clear", str(VENV)] + (["--system-site-packages"] if see_packages else [])
    if subprocess.run(command).returncode != 0:
        sys.exit(f"{python} -m venv failed; on Debian or Ubuntu: apt-get install python3-venv")
    return str(VENV / "bin" / "python")


def beside(python: str, name: str) -> str:
    """Returns the Python of an environment in .cache that sees the packages of `python` and never changes them."""
    folder = ROOT / ".cache" / name
    own = str(folder / "bin" / "python")
    if not Path(own).exists():
        say(f"making {folder}")
        if subprocess.run([python, "-m", "venv", "--clear", "--without-pip", str(folder)]).returncode != 0:
            sys.exit(f"{python} -m venv failed; on Debian or Ubuntu: apt-get install python3-venv")
    packages = output(own, "import sysconfig; print(sysconfig.get_path('purelib'))") or sys.exit(f"{own} does not run")
    Path(packages, "beside.pth").write_text(f"{output(python, _PACKAGE_FOLDERS)}\n", encoding="utf-8")
    return own


def torch_requirement() -> list[str]:
    """Returns pip's requirement: the newest PyTorch with an NVIDIA driver, else TORCH without CUDA.

    If PyTorch's own index cannot be reached, pip's configuration decides: a folder of wheels or a mirror may have the
    CPU build. PyPI has only the CUDA build, which is larger but usable.
    """
    if has_nvidia_driver():
        return ["torch"]
    requirement = f"torch=={TORCH}"
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=10).close()
        return [requirement, "--index-url", CPU_INDEX]
    return [requirement]


def python_with_torch() -> str:
    """Returns the Python to use; makes .venv if none has PyTorch."""
    active = os.environ.get("VIRTUAL_ENV")
    candidates = [f"{active}/bin/python"] if active else []
    candidates += [usable_python(), str(VENV / "bin" / "python")]
    for python in candidates:
        if Path(python).exists() and torch_version(python):
            return python
    python = make_venv(usable_python(), see_packages=False)
    say("no PyTorch found: installing one")
    if subprocess.run([python, "-m", "pip", "install", *torch_requirement()]).returncode != 0:
        sys.exit("PyTorch could not be installed; install one into the active environment and run this again")
    return python


def missing(python: str, extras: list[str]) -> list[str]:
    """Returns the requirements of this project and its `extras` that `python` does not meet."""
    import json

    if output(python, "import pip") is None and subprocess.run([python, "-m", "ensurepip"]).returncode != 0:
        sys.exit(f"{python} has no pip; install it: {python} -m ensurepip, or on Debian: apt-get install python3-pip")
    table = json.loads(output(python, _EXTRAS, str(ROOT / "pyproject.toml")) or "{}")
    wanted = [text for extra in ["", *extras] for text in table[extra]]
    found = output(python, _MISSING, *dict.fromkeys(wanted))
    return found.splitlines() if found is not None else wanted


def install(python: str, requirements: list[str]) -> None:
    """Installs `requirements` without changing PyTorch's version."""
    constraints = ROOT / ".cache" / "constraints.txt"
    constraints.parent.mkdir(exist_ok=True)
    constraints.write_text(f"torch=={torch_version(python)}\n", encoding="utf-8")
    say(f"installing {', '.join(requirements)}")
    command = [python, "-m", "pip", "install", "--quiet", "-c", str(constraints), *requirements]
    if subprocess.run(command).returncode != 0:
        sys.exit(f"the packages above could not be installed with {python}; see pip's message")


def install_editable(python: str) -> None:
    """Makes `python` find this checkout, built in place. A package installed otherwise stays."""
    found = output(python, _INSTALLED, str(ROOT))
    if found is None or found == "current":
        return
    if found not in ("", "stale"):
        say(f"{python} has patrickstar from {found}, which stays; make and PYTHONPATH={ROOT} find this one")
        return
    if output(python, _MAY_INSTALL) is None:
        say(f"{python} must not be changed, so patrickstar is not installed there; PYTHONPATH={ROOT} finds it")
        return
    say(f"installing patrickstar into {python}: what is here, as it is (pip install --editable)")
    command = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    if subprocess.run([*command, "--editable", str(ROOT)]).returncode != 0:
        sys.exit(f"patrickstar could not be installed into {python}; see pip's message")


def prepare(extras: list[str], apart: str | None = None) -> str:
    """Returns a Python with PyTorch and all `extras`; missing packages go into the environment `apart`, if given."""
    python = python_with_torch()
    if apart is not None:
        python = beside(python, apart)
    lacking = missing(python, extras)
    if lacking and output(python, _MAY_INSTALL) is None:
        own = str(VENV / "bin" / "python")
        python = own if Path(own).exists() and torch_version(own) else make_venv(python, see_packages=True)
        if torch_version(python) is None:
            sys.exit("the environment with PyTorch cannot be changed; activate one that can be, and run this again")
        lacking = missing(python, extras)
    if lacking:
        install(python, lacking)
    return python


def main() -> None:
    """Parses the command line and executes Python."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--extras", default="", help="comma-separated names from pyproject.toml")
    parser.add_argument("--editable", action="store_true", help="install this checkout, which is built in place")
    parser.add_argument("--apart", metavar="NAME", help="install what is missing into .cache/NAME, which sees the rest")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="-- and what Python is to run")
    options = parser.parse_args()
    python = prepare([extra for extra in options.extras.split(",") if extra], options.apart)
    if options.editable:
        install_editable(python)
    folder = str(Path(python).parent)
    path = os.environ.get("PATH", "").split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(dict.fromkeys([folder, *path]))  # for ninja
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    if arguments:
        os.execv(python, [python, *arguments])


if __name__ == "__main__":
    main()

"""Findings from a report of ``python -m patrickstar.env``: missing parts, and commands that fix them.

Standard library only, like the report. Findings depend on the report alone, except how pip may install here.
"""

from __future__ import annotations

import dataclasses
import sys
import sysconfig
from pathlib import Path
from typing import Any

from patrickstar.diagnostics.used_packages import PACKAGES, REQUIRED

MINIMUM_TORCH = (2, 6)
# Equal to build_backend/patrickstar_pins.py, which an installed package lacks; tests/diagnostics/test_env.py compares
# them.
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

Section = dict[str, Any]
"""A part of the report: values by name, or one key ``error``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A missing or suboptimal part."""

    problem: str
    """One clause, with the values that show it."""
    fix: str
    """The command or step that fixes it."""
    fatal: bool = False
    """True if PatrickStar cannot be used because of it."""


def diagnose(report: dict[str, Section]) -> list[Finding]:
    """Findings from :func:`patrickstar.env.collect`'s report, fatal ones first."""
    findings = [
        *_diagnose_torch(report),
        *_diagnose_extension(report),
        *_diagnose_machine(report),
        *_diagnose_packages(report),
    ]
    return sorted(findings, key=lambda finding: not finding.fatal)


def _pip_install(what: str, report: dict[str, Section]) -> str:
    python = report["python"].get("executable", "python")
    managed = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists() and sys.prefix == sys.base_prefix
    if managed:  # pip refuses to install there
        return f"{python} -m venv .venv && .venv/bin/python -m pip install {what}"
    return f"{python} -m pip install {what}"


def _diagnose_torch(report: dict[str, Section]) -> list[Finding]:
    torch, has_driver = report["torch"], bool(report["gpu"].get("driver"))
    wanted = f"torch=={TORCH}" + ("" if has_driver else f" --extra-index-url {CPU_INDEX}")
    if "error" in torch:
        fix = _pip_install(wanted, report)
        return [Finding(problem=f"PyTorch cannot be imported ({torch['error']})", fix=fix, fatal=True)]
    if tuple(int(part) for part in torch["version"].split("+")[0].split(".")[:2]) < MINIMUM_TORCH:
        needed = ".".join(map(str, MINIMUM_TORCH))
        problem = f"PyTorch is {torch['version']}, PatrickStar needs {needed} or newer"
        return [Finding(problem=problem, fix=_pip_install(wanted, report), fatal=True)]
    if has_driver and torch["cuda"] is None:
        fix = _pip_install(f"--force-reinstall torch=={TORCH}", report) + ", then build PatrickStar again"
        return [Finding(problem=f"there is an NVIDIA driver, but PyTorch {torch['version']} has no CUDA", fix=fix)]
    if torch["cuda"] is not None and torch["sees_gpus"] == 0:
        problem = f"PyTorch {torch['version']} has CUDA {torch['cuda']} but sees no GPU; devices will be simulated"
        driver = report["gpu"].get("driver_cuda") or "none"
        fix = f"nvidia-smi should list the GPUs; the driver's CUDA is {driver} and must not be older; see also "
        return [Finding(problem=problem, fix=fix + "CUDA_VISIBLE_DEVICES")]
    return []


def _diagnose_extension(report: dict[str, Section]) -> list[Finding]:
    torch, extension = report["torch"], report["extension"]
    if "error" in torch:
        return []  # PyTorch must be fixed first
    rebuild = _rebuild_command(report)
    if "error" in extension:
        problem = f"the extension patrickstar._C cannot be imported ({extension['error']})"
        if report["patrickstar"].get("source_checkout") and "No module named" in problem:
            problem += f": it was not built in place, and {Path.cwd()} or PYTHONPATH puts the checkout first"
        return [*_diagnose_compiler(report), Finding(problem=problem, fix=rebuild, fatal=True)]
    built = extension["built_with"]
    if torch["cuda"] is None or built["cuda"] is not None:
        return []
    problem = f"PyTorch has CUDA {torch['cuda']}, but the extension was built without its CUDA part"
    nvcc = report["toolchain"].get("nvcc_version")
    if nvcc is None or nvcc.split(".")[0] != torch["cuda"].split(".")[0]:
        rebuild = f"{_toolkit_step(torch['cuda'], report)}; then {rebuild}"
        problem += f" (nvcc: {nvcc or 'none found'})"
    return [Finding(problem=problem, fix=rebuild, fatal=torch["sees_gpus"] > 0)]


def _rebuild_command(report: dict[str, Section]) -> str:
    checkout = report["patrickstar"].get("source_checkout")
    if checkout:
        return f"make -C {checkout} build"
    return _pip_install("--force-reinstall --no-deps /path/to/patrickstar", report)


def _toolkit_step(cuda: str, report: dict[str, Section]) -> str:
    if int(cuda.split(".")[0]) >= 13:
        return _pip_install(f'"cuda-toolkit[nvcc,nvvm,crt,cccl]=={cuda}.*"', report)
    return f"install CUDA toolkit {cuda} from https://developer.nvidia.com/cuda-toolkit-archive, set CUDA_HOME to it"


def _diagnose_compiler(report: dict[str, Section]) -> list[Finding]:
    if report["toolchain"].get("cxx"):
        return []
    return [Finding(problem="there is no C++ compiler to build the extension with", fix="apt-get install g++")]


def _diagnose_machine(report: dict[str, Section]) -> list[Finding]:
    findings = []
    isa, memory = report["isa"], report["host memory"]
    if "PATRICKSTAR_ISA" in isa.get("error", ""):
        findings.append(Finding(problem=isa["error"], fix="unset PATRICKSTAR_ISA", fatal=True))
    if memory.get("transparent_huge_pages") == "never":
        problem = "transparent huge pages are off, which costs the CPU optimizer a tenth of its speed or more"
        fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        findings.append(Finding(problem=problem, fix=fix))
    return findings


def _diagnose_packages(report: dict[str, Section]) -> list[Finding]:
    """One finding for each required package or wrong version; one for all other absent packages."""
    findings, absent = [], []
    for package in PACKAGES:
        version = report["packages"].get(package.name, {}).get("version")
        fix = _pip_install(f'"{package.requirement}"', report)
        if version is None and package.extra == REQUIRED:
            findings.append(Finding(problem=f"{package.name} is missing ({package.purpose})", fix=fix, fatal=True))
        elif version is None:
            absent.append(package)
        elif not package.supports(version):
            problem = f"{package.name} is {version}, PatrickStar works with {package.versions} ({package.purpose})"
            findings.append(Finding(problem=problem, fix=fix, fatal=package.extra == REQUIRED))
    if absent:
        names = ", ".join(f"{package.name} ({package.purpose})" for package in absent)
        fix = _pip_install(" ".join(f'"{package.requirement}"' for package in absent), report)
        findings.append(Finding(problem=f"optional packages are not installed: {names}", fix=fix))
    return findings

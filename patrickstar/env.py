"""``patrickstar env``: reports this machine and installation, missing parts, and fixes.

Its output is for bug reports, so it works where PatrickStar does not: it needs only the standard library, and a failing
section shows its error. ``--json`` prints the same as JSON. The exit status is 1 if PatrickStar cannot be used, else 0.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from patrickstar import __version__
from patrickstar.command.flags import CommandParser
from patrickstar.diagnostics.env_findings import Finding, Section, diagnose
from patrickstar.diagnostics.used_packages import PACKAGES
from patrickstar.machine import host_memory
from patrickstar.sizes import show_size

_COMMAND_TIMEOUT_S = 20


def collect() -> dict[str, Section]:
    """All sections of the report by name. A failing section has one key, ``error``."""
    sections: dict[str, Callable[[], Section]] = {
        "patrickstar": _patrickstar,
        "python": _python,
        "torch": _torch,
        "extension": _extension,
        "isa": _isa,
        "cpu": _cpu,
        "gpu": _gpu,
        "toolchain": _toolchain,
        "host memory": _host_memory,
        "pinning": _pinning,
        "packages": _packages,
    }
    report: dict[str, Section] = {}
    for name, make in sections.items():
        try:
            report[name] = make()
        except Exception as error:  # any error belongs in the report
            report[name] = {"error": f"{type(error).__name__}: {error}"}
    return report


# The sections.


def _patrickstar() -> Section:
    folder = Path(__file__).resolve().parent
    checkout = folder.parent if (folder.parent / "setup.py").exists() else None
    return {"version": __version__, "folder": str(folder), "source_checkout": str(checkout) if checkout else None}


def _python() -> Section:
    return {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()}


def _torch() -> Section:
    import torch

    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else None
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "sees_gpus": torch.cuda.device_count(),
        "folder": str(Path(torch.__file__).parent),
    }


def _extension() -> Section:
    core = _core()
    info = core.build_info()
    loaded = core.collective.nccl_version() if info["nccl"] else None
    return {"file": core.__file__, "built_with": info, "nccl_loaded": loaded}


def _core() -> Any:
    """The extension, with PyTorch attached. Raises ImportError with the bare reason."""
    importlib.import_module("torch")
    core = importlib.import_module("patrickstar._C")
    importlib.import_module("patrickstar.torch_shim").attach()
    return core


def _isa() -> Section:
    section = {"processor": platform.machine(), "override": os.environ.get("PATRICKSTAR_ISA") or None}
    try:
        optim = _core().optim
    except ImportError:
        wanted = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}
        return section | {"chosen": None, "supported": None, "cpu_flags": sorted(wanted & _cpu_flags())}
    section["supported"] = optim.supported_isas()
    section["chosen"] = optim.isa()  # raises for a wrong PATRICKSTAR_ISA; the message has the remedy
    return section


def _cpu() -> Section:
    nodes = [path for path in Path("/sys/devices/system/node").glob("node[0-9]*")]
    try:
        used = _core().num_available_cpus()
    except ImportError:
        used = None
    model = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return {
        "model": model.group(1) if model else platform.processor(),
        "cpus": os.cpu_count(),
        "allowed": len(os.sched_getaffinity(0)),
        "used_by_patrickstar": used,
        "numa_nodes": len(nodes) or 1,
    }


def _gpu() -> Section:
    version = re.search(r"Kernel Module.*?\s(\d+\.\d+[.\d]*)", _read("/proc/driver/nvidia/version"))
    devices = []
    for line in _run(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    ).splitlines():
        name, memory, driver = (field.strip() for field in line.split(","))
        devices.append({"name": name, "memory": memory})
        version = version or re.match(r"(.*)", driver)
    return {"driver": version.group(1) if version else None, "driver_cuda": _driver_cuda(), "devices": devices}


def _toolchain() -> Section:
    compiler = os.environ.get("CXX", "c++").split()[0]
    nvcc = next((path for path in _nvcc_candidates() if path and Path(path).exists()), None)
    release = re.search(r"release ([\d.]+)", _run(nvcc, "--version")) if nvcc else None
    return {
        "cxx": _run(compiler, "--version").partition("\n")[0] or None,
        "nvcc": nvcc,
        "nvcc_version": release.group(1) if release else None,
    }


def _host_memory() -> Section:
    pages = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled"))
    usable = host_memory.usable_bytes()
    return {
        "total_bytes": host_memory.total_bytes(),
        "available_bytes": host_memory.mem_available_bytes(),
        "cgroup_limit_bytes": host_memory.cgroup_limit_bytes(),
        "address_space_limit_bytes": _limit(resource.RLIMIT_AS)[0],
        "usable_bytes": usable,
        "patrickstar_default_bytes": host_memory.default_budget_bytes(),
        "transparent_huge_pages": pages.group(1) if pages else None,
    }


def _pinning() -> Section:
    # Informational: cudaHostRegister of 1 GiB succeeded under a limit of 64 KiB, as an ordinary user without
    # capabilities too (H100, driver 580). NCCL over InfiniBand does need it.
    soft, hard = _limit(resource.RLIMIT_MEMLOCK)
    return {"memlock_soft_bytes": soft, "memlock_hard_bytes": hard}


def _packages() -> Section:
    return {
        package.name: {"version": package.installed_version(), "wanted": package.versions, "for": package.purpose}
        for package in PACKAGES
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _run(*command: str) -> str:
    """Standard output of a command; empty if it is missing, fails, or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _limit(which: int) -> tuple[int | None, int | None]:
    """Soft and hard resource limit in bytes; None: unlimited."""
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return soft, hard


def _cpu_flags() -> set[str]:
    flags = re.search(r"^flags\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return set(flags.group(1).split()) if flags else set()


def _driver_cuda() -> str | None:
    """The newest CUDA version that the driver supports, such as "13.0"; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _nvcc_candidates() -> list[str | None]:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return [f"{home}/bin/nvcc"]
    wheel = [f"{folder}/nvidia/cu13/bin/nvcc" for folder in sys.path]
    return [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc", *wheel]


# Printing.


def _value(key: str, value: Any) -> str:
    if key.endswith("limit_bytes") or key.startswith("memlock"):
        return "unlimited" if value is None else show_size(value)
    if value is None:
        return "none"
    if key.endswith("_bytes"):
        return show_size(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(name, item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(_value("", item) for item in value) or "none"
    return str(value)


def format_report(report: dict[str, Section], findings: list[Finding]) -> str:
    """The report as text, findings last."""
    lines = []
    for name, section in report.items():
        for index, (key, value) in enumerate(section.items()):
            label = key.removesuffix("_bytes").replace("_", " ")
            lines.append(f"{name if index == 0 else '':<12} {label:<20} {_value(key, value)}")
    lines.append("")
    for finding in findings:
        lines += [f"{'missing' if finding.fatal else 'note'}: {finding.problem}", f"    fix: {finding.fix}"]
    if not any(finding.fatal for finding in findings):
        lines.append("PatrickStar is ready to use.")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, prog: str = "python -m patrickstar.env") -> int:
    """Prints the report; returns the exit status."""
    parser = CommandParser(prog, "What this machine and this installation offer, what is missing, and what mends it.")
    parser.add_argument("--json", action="store_true", help="print JSON: the sections, and a list of findings")
    options = parser.parse_args(arguments)
    report = collect()
    findings = diagnose(report)
    if options.json:
        print(json.dumps(report | {"findings": [dataclasses.asdict(item) for item in findings]}, indent=1))
    else:
        print(format_report(report, findings))
    return 1 if any(finding.fatal for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m patrickstar.env``: what this machine and this installation offer, what is missing, and what mends it.

Made to be pasted into a bug report, so it works where PatrickStar does not: it needs the standard library alone, and a
part that fails says why instead of ending the report. ``--json`` prints the same as JSON. The exit status is 1 when
PatrickStar cannot be used as it is, else 0.
"""

from __future__ import annotations

import argparse
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
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patrickstar import __version__, host_memory

MINIMUM_TORCH = (2, 6)
# As in build_backend/patrickstar_pins.py, which an installed package does not have; tests/test_env.py compares them.
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

_HOST_SHARE = 0.8  # client.mem_tracer.overall_cpu_mem_ratio
_COMMAND_TIMEOUT_S = 20
Section = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is missing or could be better."""

    problem: str
    """One clause, with the values that show it."""
    fix: str
    """The command or the step that mends it."""
    fatal: bool = False
    """Whether PatrickStar cannot be used because of it."""


def collect() -> dict[str, Section]:
    """All sections of the report by name. A section that cannot be made holds one key, ``error``."""
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
    }
    report: dict[str, Section] = {}
    for name, make in sections.items():
        try:
            report[name] = make()
        except Exception as error:  # whatever is broken here is what the report is for
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
    core = importlib.import_module("patrickstar._C")
    info = core.build_info()
    loaded = core.collective.nccl_version() if info["nccl"] else None
    return {"file": core.__file__, "built_with": info, "nccl_loaded": loaded}


def _isa() -> Section:
    section = {"processor": platform.machine(), "override": os.environ.get("PATRICKSTAR_ISA") or None}
    try:
        optim = importlib.import_module("patrickstar._C").optim
    except ImportError:
        wanted = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}
        return section | {"chosen": None, "supported": None, "cpu_flags": sorted(wanted & _cpu_flags())}
    section["supported"] = optim.supported_isas()
    section["chosen"] = optim.isa()  # raises for a wrong PATRICKSTAR_ISA, with the remedy
    return section


def _cpu() -> Section:
    nodes = [path for path in Path("/sys/devices/system/node").glob("node[0-9]*")]
    try:
        used = importlib.import_module("patrickstar._C").num_available_cpus()
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
    available = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    pages = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled"))
    usable = host_memory.usable_bytes()
    return {
        "total_bytes": host_memory.total_bytes(),
        "available_bytes": int(available.group(1)) * 1024 if available else None,
        "cgroup_limit_bytes": host_memory.cgroup_limit_bytes(),
        "address_space_limit_bytes": _limit(resource.RLIMIT_AS)[0],
        "usable_bytes": usable,
        "patrickstar_default_bytes": int(usable * _HOST_SHARE),
        "transparent_huge_pages": pages.group(1) if pages else None,
    }


def _pinning() -> Section:
    # For the record: cudaHostRegister of 1 GiB succeeded under a limit of 64 KiB, as an ordinary user without
    # capabilities too (H100, driver 580). NCCL over InfiniBand does need it.
    soft, hard = _limit(resource.RLIMIT_MEMLOCK)
    return {"memlock_soft_bytes": soft, "memlock_hard_bytes": hard}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _run(*command: str) -> str:
    """Standard output of a command, or nothing when it is not there, fails, or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _limit(which: int) -> tuple[int | None, int | None]:
    """Soft and hard resource limit in bytes; None is unlimited."""
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return soft, hard


def _cpu_flags() -> set[str]:
    flags = re.search(r"^flags\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return set(flags.group(1).split()) if flags else set()


def _driver_cuda() -> str | None:
    """The newest CUDA version that the driver knows, such as "13.0"; None without a driver."""
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


# What is missing, and what mends it.


def diagnose(report: dict[str, Section]) -> list[Finding]:
    """Findings of a report of :func:`collect`, those that stop PatrickStar first."""
    findings = [*_diagnose_torch(report), *_diagnose_extension(report), *_diagnose_machine(report)]
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
        return []  # nothing can be said before that is mended
    rebuild = _rebuild_command(report)
    if "error" in extension:
        problem = f"the extension patrickstar._C cannot be imported ({extension['error']})"
        if "undefined symbol" in problem:
            problem += f": it was compiled against another PyTorch than {torch['version']}"
        elif report["patrickstar"].get("source_checkout") and "No module named" in problem:
            problem += f": it was not built in place, and {Path.cwd()} or PYTHONPATH puts the checkout first"
        return [*_diagnose_compiler(report), Finding(problem=problem, fix=rebuild, fatal=True)]
    built = extension["built_with"]
    if built["torch"] != torch["version"]:
        problem = f"the extension was compiled against PyTorch {built['torch']} and runs with {torch['version']}"
        return [*_diagnose_compiler(report), Finding(problem=problem, fix=rebuild)]
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


# Printing.


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**10:.0f} KiB"


def _value(key: str, value: Any) -> str:
    if key.endswith("limit_bytes") or key.startswith("memlock"):
        return "unlimited" if value is None else _size(value)
    if value is None:
        return "none"
    if key.endswith("_bytes"):
        return _size(value)
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


def main(arguments: list[str] | None = None) -> int:
    """Prints the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m patrickstar.env", description=__doc__.partition("\n")[0])
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

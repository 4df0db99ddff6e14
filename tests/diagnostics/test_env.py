import ast
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

import patrickstar
from patrickstar import _C, env, torch_shim
from patrickstar.diagnostics import env_findings
from patrickstar.diagnostics.used_packages import PACKAGES, REQUIRED, UsedPackage
from patrickstar.finetune.arguments import NEEDED_PACKAGES
from patrickstar.machine import host_memory
from tests.distributed import run_python

PACKAGE = Path(patrickstar.__file__).parent
ROOT = PACKAGE.parent


def run_in(folder, *command):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=folder, env=environment)


def run(*arguments, **environment):
    return run_python("-m", "patrickstar.env", *arguments, environment=environment)


@pytest.fixture
def bare_package(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "patrickstar", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_text_report():
    done = run()
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    for expected in [
        f"version              {patrickstar.__version__}",
        torch.__version__,
        _C.build_info()["compiler"],
        f"chosen               {_C.optim.isa()}",
        "memlock soft",
        "cgroup limit",
        "numa nodes",
    ]:
        assert expected in done.stdout
    assert done.stdout.endswith("PatrickStar is ready to use.\n")


def test_json_report():
    report = json.loads(run("--json").stdout)
    assert report["torch"]["version"] == torch.__version__
    assert report["extension"]["built_with"] == _C.build_info()
    assert report["isa"]["supported"] == _C.optim.supported_isas()
    assert report["cpu"]["used_by_patrickstar"] == _C.num_available_cpus()
    memory = report["host memory"]
    assert memory["usable_bytes"] == host_memory.usable_bytes() >= memory["patrickstar_default_bytes"] > 0
    assert not [finding for finding in report["findings"] if finding["fatal"]]


def test_without_the_extension(bare_package):
    code = """
try:
    from patrickstar import initialize_engine
except ImportError as error:
    print(error)
from patrickstar import env
raise SystemExit(env.main([]))
"""
    done = run_in(bare_package, "-c", code)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stdout.partition("\n")[0].count("python -m patrickstar.env says what is missing") == 1
    assert torch.__version__ in done.stdout and "cgroup limit" in done.stdout
    assert "missing: the extension patrickstar._C cannot be imported" in done.stdout
    assert re.search(r"fix: \S+ -m pip install --force-reinstall --no-deps ", done.stdout)


def test_with_an_extension_that_does_not_load_in_a_checkout(bare_package):
    (bare_package / "setup.py").touch()
    (bare_package / "patrickstar" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"no library")
    done = run_in(bare_package, "-m", "patrickstar.env")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "missing: the extension patrickstar._C cannot be imported (ImportError: " in done.stdout
    assert f"fix: make -C {bare_package} build" in done.stdout


def test_without_pytorch(bare_package):
    # -S: no site-packages, thus the standard library alone.
    done = run_in(bare_package, "-S", "-m", "patrickstar.env")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "missing: PyTorch cannot be imported (ModuleNotFoundError" in done.stdout
    assert f"pip install torch=={env_findings.TORCH}" in done.stdout
    assert "host memory" in done.stdout and "model" in done.stdout


def test_a_pytorch_without_shim_and_compiler_is_refused_at_every_import(tmp_path):
    code = f"""
import os, sys, torch
for version in ({torch.__version__ + ".other"!r}, "2.5.1+cpu"):
    if os.fork() > 0:
        assert os.wait()[1] == 0
        continue
    torch.__version__ = version
    for names in ("_C", "initialize_engine", "_C"):
        try:
            exec(f"from patrickstar import {{names}}")
        except ImportError as error:
            print(error, flush=True)
    os._exit(0)
"""
    environment = {**os.environ, "PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("CXX", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all("no shim for PyTorch 2.5.1+cpu (here: torch" in line for line in lines), lines


def test_a_shim_is_compiled_once_for_a_pytorch_that_has_none(tmp_path):
    """The compiler is a script that gives what the build made of the same sources."""
    name = torch_shim.shim_name(torch.__version__, _C.build_info()["cuda"])
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        f'while [ "$1" != -o ]; do shift; done; cp {torch_shim.FOLDER / name} "$2"\n'
        'test -f "${3:?}" && test -f "$4"\n'
    )
    compiler.chmod(0o755)
    code = """
import os, sys, torch
from pathlib import Path
for run in range(2):
    if os.fork() > 0:
        assert os.wait()[1] == 0
        continue
    print("run", run, file=sys.stderr, flush=True)
    from patrickstar import torch_shim
    torch_shim.FOLDER = Path("empty")
    from patrickstar import initialize_engine
    model, _ = initialize_engine(lambda: torch.nn.Linear(2, 2), local_rank=0, config={"device_memory": "1MiB",
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    print(model(torch.ones(1, 2)).shape, flush=True)
    sys.stderr.flush()
    os._exit(0)
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0 and done.stdout.count("torch.Size([1, 2])") == 2, done.stderr
    first, second = done.stderr.partition("run 0")[2].split("run 1")
    assert f"compiling the shim for PyTorch {torch.__version__}, once" in first and "compiling" not in second
    assert [path.name for path in tmp_path.rglob("torch*.so")] == [name]


def test_a_wrong_isa_is_explained():
    done = run(PATRICKSTAR_ISA="mmx")
    assert done.returncode == 1
    assert 'PATRICKSTAR_ISA is "mmx"' in done.stdout and "fix: unset PATRICKSTAR_ISA" in done.stdout


def test_a_section_that_fails_does_not_end_the_report(monkeypatch):
    def broken():
        raise OSError("no such sensor")

    monkeypatch.setattr(env, "_cpu", broken)
    report = env.collect()
    assert report["cpu"] == {"error": "OSError: no such sensor"}
    assert "no such sensor" in env.format_report(report, env.diagnose(report))


@pytest.fixture
def healthy():
    report = copy.deepcopy(env.collect())
    report["torch"] = {"version": "2.11.0", "cuda": "13.0", "nccl": "2.28.9", "sees_gpus": 1, "folder": "/torch"}
    report["extension"] = {"file": "/_C.so", "built_with": {"torch": "2.11.0", "cuda": "13.0", "nccl": "2.28.9"}}
    report["gpu"] = {"driver": "580.1", "driver_cuda": "13.0", "devices": [{"name": "H200", "memory": "143771 MiB"}]}
    report["toolchain"] = {"cxx": "c++ 12", "nvcc": "/usr/local/cuda/bin/nvcc", "nvcc_version": "13.0"}
    report["pinning"] = {"memlock_soft_bytes": None, "memlock_hard_bytes": None}
    report["host memory"]["transparent_huge_pages"] = "madvise"
    report["packages"] = {package.name: {"version": ".".join(map(str, package.minimum))} for package in PACKAGES}
    return report


def test_a_healthy_machine_has_no_findings(healthy):
    assert env.diagnose(healthy) == []


@pytest.mark.parametrize(
    ("section", "values", "problem", "fix", "fatal"),
    [
        ("torch", {"version": "2.5.1"}, "2.6 or newer", "pip install torch==", True),
        ("torch", {"cuda": None, "sees_gpus": 0}, "PyTorch 2.11.0 has no CUDA", "pip install --force-reinstall", False),
        ("torch", {"sees_gpus": 0}, "sees no GPU", "nvidia-smi", False),
        ("extension", {"built_with": {"torch": "2.11.0", "cuda": None}}, "without its CUDA part", "make -C", True),
        ("extension", {"error": "ImportError: no shim for PyTorch 2.11"}, "no shim for PyTorch", "make -C", True),
        ("packages", {"pydantic": {"version": None}}, "pydantic is missing", 'pip install "pydantic>=2.7"', True),
        ("packages", {"lightning": {"version": None}}, "not installed: lightning (", '"lightning>=2.6,<3"', False),
        ("packages", {"transformers": {"version": "4.57.1"}}, "transformers is 4.57.1", '"transformers>=5', False),
        ("host memory", {"transparent_huge_pages": "never"}, "huge pages are off", "echo madvise", False),
    ],
)
def test_each_fault_is_found_with_its_remedy(healthy, section, values, problem, fix, fatal):
    healthy[section] |= values
    healthy["patrickstar"]["source_checkout"] = "/checkout"
    found = [item for item in env.diagnose(healthy) if problem in item.problem]
    assert len(found) == 1, env.diagnose(healthy)
    assert fix in found[0].fix and found[0].fatal == fatal


def test_a_missing_nvcc_is_named_before_the_rebuild(healthy):
    healthy["extension"]["built_with"]["cuda"] = None
    healthy["toolchain"] |= {"nvcc": None, "nvcc_version": None}
    (finding,) = env.diagnose(healthy)
    assert 'pip install "cuda-toolkit[nvcc,nvvm,crt,cccl]==13.0.*"; then ' in finding.fix


def test_versions_agree_with_the_build():
    sys.path.insert(0, str(ROOT / "build_backend"))
    import patrickstar_pins as pins

    ours = (env_findings.TORCH, env_findings.CPU_INDEX, env_findings.MINIMUM_TORCH)
    assert ours == (pins.TORCH, pins.CPU_INDEX, pins.MINIMUM_TORCH)
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
    assert patrickstar.__version__ == version


def test_requirements_are_those_of_the_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {REQUIRED: project["dependencies"], **project["optional-dependencies"]}
    for package in PACKAGES:
        assert package.requirement in extras[package.extra], package


def test_what_modules_import_at_once_is_required():
    required = {package.name for package in PACKAGES if package.extra == REQUIRED}
    known = {"torch", "patrickstar", "pydantic_core", *required, *sys.stdlib_module_names}  # pydantic brings its core
    of_hosts = {package.name for package in PACKAGES} | {"lightning_utilities"}  # Lightning brings its utilities
    on_demand = {PACKAGE / "profiling" / "picture.py", *(PACKAGE / "ones" / "cluster").glob("*.py")}
    for path in set(PACKAGE.rglob("*.py")) - on_demand:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            unknown = {module.partition(".")[0] for module in modules} - known
            if (PACKAGE / "integrations") in path.parents:  # imported by those who have the host
                unknown -= of_hosts
            if (PACKAGE / "finetune") in path.parents:  # imported after these were found
                unknown -= set(NEEDED_PACKAGES)
            assert not unknown, f"{path.relative_to(PACKAGE)} imports {unknown}, which pip install does not bring"


def test_versions_of_packages_are_compared_as_numbers():
    package = UsedPackage(name="a", purpose="", extra="", minimum=(1, 10), below=(2,))
    assert package.requirement == "a>=1.10,<2"
    assert [package.supports(version) for version in ("1.9.9", "1.10", "1.10.0rc1", "1.11.3+cpu", "2.0.0")] == [
        False,
        True,
        True,
        True,
        False,
    ]

"""pip install in pip's build isolation: against the PyTorch of the environment it installs into, or one sentence. The
environments are made without pip and filled with the pip that runs the tests.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import patrickstar
from patrickstar.torch_shim import compiling

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build_backend"))

sys.path.insert(0, str(ROOT / "tools"))

import environment  # noqa: E402
import patrickstar_ninja as ninja  # noqa: E402
import patrickstar_pins  # noqa: E402
import patrickstar_recipe as recipe  # noqa: E402

NOT_SOURCE = shutil.ignore_patterns(
    ".git", "build", "dist", "*.so", "*.egg-info", ".venv", ".cache", "__pycache__", ".hypothesis", ".*_cache", "shared"
)


def run(command, **kwargs):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | kwargs.pop("env", {})
    return subprocess.run(command, capture_output=True, text=True, env=environment, **kwargs)


def make_environment(folder, *, with_torch):
    """A virtual environment's Python. A .pth file makes PyTorch visible, as an editable install's would."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    if with_torch:
        packages = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).stdout.strip()
        Path(packages, "host.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    return str(python)


# Objects that `make build` made of the same sources are taken as they are; the shim is compiled, and all is linked.
COMPILER = """#!/bin/sh
object="" compiles="" previous=""
for argument in "$@"; do
  case "$previous" in -o) object=$argument ;; esac
  case "$argument" in -c) compiles=yes ;; esac
  previous=$argument
done
made="{made}/$(basename "$object")"
if [ -n "$compiles" ] && [ -f "$made" ]; then
  cp "$made" "$object"
else
  exec {compiler} "$@"
fi
"""


def pip_install(python, source, **environment):
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-v", "."]
    return run(command, cwd=source, env={"PATRICKSTAR_OPTIMIZATION": "-O0", **environment})


def make_compiler(path):
    made = ROOT / "build" / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    path.write_text(COMPILER.format(made=made, compiler=shutil.which(os.environ.get("CXX", "c++"))))
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT, folder / "checkout", ignore=NOT_SOURCE)
    # PyTorch must not be imported.
    code = "import sys; sys.modules['torch'] = None; import patrickstar_build as b; print(b.build_sdist(sys.argv[1]))"
    environment = {"PYTHONPATH": str(folder / "checkout" / "build_backend")}
    done = run([sys.executable, "-c", code, str(folder)], cwd=folder / "checkout", env=environment)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(folder.glob("patrickstar-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(folder)
    return next(path for path in folder.glob("patrickstar-*") if path.is_dir())


def test_source_distribution_is_whole_and_clean(source):
    for folder in ["csrc", "build_backend", "tools", "tests", "examples"]:
        ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()}
        ours = {name for name in ours if "__pycache__" not in name}
        theirs = {path.relative_to(source).as_posix() for path in (source / folder).rglob("*") if path.is_file()}
        assert ours == theirs
    assert all((source / "patrickstar" / name).exists() for name in ("_C.pyi", "config/other_keys.md"))
    assert not list(source.rglob("*.so")) and not (source / "build").exists()


@pytest.mark.slow
def test_pip_install_builds_against_the_pytorch_of_the_environment(source, tmp_path):
    python = make_environment(tmp_path / "environment", with_torch=True)
    started = time.monotonic()
    installed = pip_install(python, source, CXX=make_compiler(tmp_path / "compiler"))
    print(f"pip install . took {time.monotonic() - started:.0f} s on {len(os.sched_getaffinity(0))} cores")
    assert installed.returncode == 0, installed.stdout[-4000:] + installed.stderr
    assert "Collecting torch" not in installed.stdout
    code = "from importlib.metadata import version; from patrickstar import _C; import json\n"
    code += "print(json.dumps([_C.__file__, _C.build_info(), version('patrickstar')]))"
    loaded = run([python, "-W", "ignore", "-c", code], cwd=tmp_path)
    assert loaded.returncode == 0, loaded.stderr
    file, info, version = json.loads(loaded.stdout)
    assert Path(file).is_relative_to(tmp_path / "environment")
    assert info["torch"] == torch.__version__
    part = f"cu{info['cuda'].split('.')[0]}" if info["cuda"] else "cpu"
    assert version == f"{patrickstar.__version__}+{part}"
    # One line for each unit, nanobind, the module and its shim for PyTorch, and no whole commands.
    lines = [line.strip() for line in (installed.stdout + installed.stderr).splitlines()]
    sources = [name for name in recipe.sources(source, with_cuda=info["cuda"] is not None) if name.endswith(".cpp")]
    built = [line.split("] ")[1] for line in lines if line.startswith("[")]
    assert len(built) == len(ninja.units(sources, source)) + 3 and not any(" -MMD " in line for line in lines)
    assert compiling.shim_name(torch.__version__, info["cuda"]) in built
    assert (Path(file).parent / "torch_shim" / "csrc" / "torch_shim" / "shim.cpp").exists()
    assert {"_C.pyi", "py.typed"} <= {path.name for path in Path(file).parent.iterdir()}
    assert (Path(file).parent / "config" / "other_keys.md").exists()
    report = run([python, "-m", "patrickstar.env"], cwd=tmp_path)
    assert "PatrickStar is ready to use." in report.stdout, report.stdout + report.stderr


def test_units_hold_every_source_once_and_isa_files_alone():
    sources = [name for name in recipe.sources(ROOT, with_cuda=True) if name.endswith(".cpp")]
    units = ninja.units(sources, ROOT)
    assert sorted(name for members in units.values() for name in members) == sources
    assert units["optim_cpu_avx512"] == ["csrc/optim/cpu_avx512.cpp"]
    assert all(len({Path(name).parent for name in members}) == 1 for members in units.values())
    with_cuda = [members for members in units.values() if any("/cuda_" in name for name in members)]
    assert all(Path(name).name.startswith(("cuda_", "nccl_")) for members in with_cuda for name in members)


@pytest.mark.parametrize(
    ("version", "cuda", "abi", "name"),
    [
        ("2.13.0+cpu", None, True, "torch2.13.cpu.so"),
        ("2.11.0+cu130", "13.0", True, "torch2.11.cu13.so"),
        ("2.6.0+cu124", "12.4", False, "torch2.6.cu12.pre-cxx11.so"),
        ("2.14.0.dev20270101", None, True, "torch2.14.cpu.so"),
    ],
)
def test_a_shim_is_named_after_what_it_is_compiled_for(version, cuda, abi, name):
    assert compiling.shim_name(version, cuda, abi) == name


def test_architectures_become_arguments_of_nvcc():
    assert recipe.gencode("8.0;9.0a 12.0+PTX") == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]
    with pytest.raises(SystemExit, match=r"'Hopper'; give numbers"):
        recipe.gencode("Hopper")


def test_without_pytorch_pip_install_stops_with_one_sentence(source, tmp_path):
    python = make_environment(tmp_path / "environment", with_torch=False)
    done = pip_install(python, source)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    (sentence,) = [line.strip() for line in output.splitlines() if line.strip().startswith("PatrickStar is compiled")]
    print(sentence)
    assert f"-m pip install torch=={patrickstar_pins.TORCH}" in sentence
    assert "Traceback" not in output and "Collecting torch" not in output and "Collecting ninja" not in output


def make_toolkit(folder, release):
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        f'--version) echo "Cuda compilation tools, release {release}, V{release}.1" ;;\n'
        '--list-gpu-arch) printf "compute_75\\ncompute_90\\ncompute_120\\n" ;;\n'
        "esac\n"
    )
    nvcc.chmod(0o755)
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime_api.h").touch()
    return folder


def test_a_compiler_that_links_its_own_libstdcxx_is_passed_over(tmp_path):
    compiler = tmp_path / "own-c++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -static-libstdc++\n')
    compiler.chmod(0o755)
    assert recipe.shares_libstdcxx("c++")
    assert not recipe.shares_libstdcxx(str(compiler))
    assert not recipe.shares_libstdcxx("false")


def test_a_toolkit_is_found_behind_a_script_on_the_path(tmp_path, monkeypatch):
    home = make_toolkit(tmp_path / "cuda", "13.0")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(home / "bin" / "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert recipe.find_cuda_home("13.0") == str(home.resolve())
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    assert recipe.find_cuda_home("13.0") is None


def test_obstacles_name_the_remedy(tmp_path):
    home = str(make_toolkit(tmp_path / "cuda", "12.8"))
    assert "has no CUDA: " in recipe.cuda_obstacle("2.13.0+cpu", None, None)
    missing = recipe.cuda_obstacle("2.11.0", "13.0", None)
    assert "there is no nvcc" in missing and 'pip install "cuda-toolkit[nvcc,nvvm,crt,cccl]==13.0.*"' in missing
    other = recipe.cuda_obstacle("2.11.0", "13.0", home)
    assert f"{home}/bin/nvcc is 12.8" in other and "cuda-toolkit" in other
    (Path(home) / "include" / "nccl.h").touch()
    assert recipe.cuda_obstacle("2.8.0", "12.6", home) is None


def test_architectures_are_those_of_pytorch_and_nvcc(tmp_path):
    home = str(make_toolkit(tmp_path / "cuda", "13.0"))
    assert recipe.architectures("sm_75 sm_80 sm_90 sm_120 compute_120", home) == "7.5;9.0;12.0+PTX"
    assert recipe.architectures(None, home) == "7.5;8.0;9.0+PTX"


@pytest.mark.parametrize(
    ("choice", "has_driver", "reason"),
    [
        ("auto", True, "this machine has an NVIDIA driver, but PyTorch 2.13.0 has no CUDA: "),
        ("1", False, "PATRICKSTAR_CUDA=1, but PyTorch 2.13.0 has no CUDA: "),
        ("auto", False, None),
        ("0", True, None),
    ],
)
def test_an_obstacle_ends_the_build_where_there_is_a_driver(monkeypatch, choice, has_driver, reason):
    monkeypatch.setenv("PATRICKSTAR_CUDA", choice)
    monkeypatch.setattr(recipe, "has_nvidia_driver", lambda: has_driver)
    if reason is None:
        assert recipe.chosen_cuda_home("2.13.0", None) is None
    else:
        with pytest.raises(SystemExit, match=reason):
            recipe.chosen_cuda_home("2.13.0", None)


def test_the_cuda_part_can_be_demanded(source, tmp_path):
    home = make_toolkit(tmp_path / "cuda", "1.0")
    done = run(
        [sys.executable, "setup.py", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path)],
        cwd=source,
        env={"PATRICKSTAR_CUDA": "1", "CUDA_HOME": str(home)},
    )
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("PATRICKSTAR_CUDA=1, but ") and message.endswith("; or set PATRICKSTAR_CUDA=0.")


@pytest.mark.parametrize(
    ("url", "editable", "script", "expected"),
    [
        (ROOT.as_uri(), True, "patrickstar.command.main:main", "current"),
        (ROOT.as_uri(), True, "patrickstar.other:main", "stale"),
        (ROOT.as_uri(), False, "patrickstar.command.main:main", ROOT.as_uri()),
        ("file:///elsewhere", True, "patrickstar.command.main:main", "file:///elsewhere"),
        (None, False, "patrickstar.command.main:main", "{packages}"),
    ],
)
def test_what_is_installed_otherwise_stays(tmp_path, capsys, url, editable, script, expected):
    python = make_environment(tmp_path / "environment", with_torch=False)
    assert environment.output(python, environment._INSTALLED, str(ROOT)) == ""
    packages = next((tmp_path / "environment" / "lib").glob("python*/site-packages"))
    found = packages / "patrickstar-0.7.0.dist-info"
    found.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: patrickstar\nVersion: {patrickstar.__version__}\n"
    (found / "METADATA").write_text(metadata)
    (found / "entry_points.txt").write_text(f"[console_scripts]\npatrickstar = {script}\n")
    if url is not None:
        (found / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": editable}}))
    expected = expected.format(packages=packages)
    assert environment.output(python, environment._INSTALLED, str(ROOT)) == expected
    if expected != "stale":
        environment.install_editable(python)
        told = capsys.readouterr().err
        assert told == "" if expected == "current" else f"has patrickstar from {expected}, which stays" in told


def test_the_environment_tool_installs_only_what_is_missing_and_holds_pytorch(tmp_path):
    project = tmp_path / "project"
    shutil.copytree(ROOT / "tools", project / "tools")
    shutil.copytree(ROOT / "build_backend", project / "build_backend")
    wheel = tmp_path / "wheels" / "absent_from_here-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("absent_from_here.py", "")
        archive.writestr(
            "absent_from_here-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: absent-from-here\nVersion: 1.0\nRequires-Dist: torch\n",
        )
        archive.writestr(
            "absent_from_here-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("absent_from_here-1.0.dist-info/RECORD", "")
    (project / "pyproject.toml").write_text(
        '[project]\ndependencies = []\n[project.optional-dependencies]\nneeded = ["absent-from-here>=1", "pytest"]\n'
    )
    packages = sysconfig.get_path("purelib")
    venv.create(project / ".venv", with_pip=False)
    inside = next((project / ".venv" / "lib").glob("python*/site-packages"))
    (inside / "host.pth").write_text(f"{Path(torch.__file__).parent.parent}\n{packages}\n")
    command = [sys.executable, "tools/environment.py", "--extras", "needed", "--"]
    code = "import absent_from_here, sys; print(sys.prefix)"
    environment = {"VIRTUAL_ENV": str(project / ".venv"), "PIP_FIND_LINKS": str(wheel.parent), "PIP_NO_INDEX": "1"}
    first = run([*command, "-c", code], cwd=project, env=environment)
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip() == str(project / ".venv")
    assert "installing absent-from-here>=1\n" in first.stderr
    assert (project / ".cache" / "constraints.txt").read_text() == f"torch=={torch.__version__}\n"
    second = run([*command, "-c", code], cwd=project, env=environment)
    assert second.returncode == 0 and "installing" not in second.stderr
    apart = run([*command[:2], "--apart", "side", *command[2:], "-c", code], cwd=project, env=environment)
    assert apart.returncode == 0 and "installing" not in apart.stderr, apart.stderr  # it sees what the other has
    assert apart.stdout.strip() == str(project / ".cache" / "side")

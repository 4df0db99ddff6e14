"""Runs the core's tests with an extension built with sanitizers: `make sanitize`.

    python tools/sanitize.py                                  # everything, one sanitizer after the other
    python tools/sanitize.py --only thread tests/collective   # a part: further arguments are pytest's

`address` is AddressSanitizer with UndefinedBehaviorSanitizer; `thread` is ThreadSanitizer. For each, csrc is compiled
with it (PATRICKSTAR_SANITIZE, build_backend/patrickstar_recipe.py) into build/sanitize/<name>, beside a copy of the
package and its tests. The in-place extension is untouched. Python and PyTorch are not instrumented, so the sanitizer's
library is preloaded through the environment, which child processes inherit.

First the faults in tools/sanitizers/planted_faults.cpp, compiled with the same flags, must give the expected reports,
and so must wrong calls of the extension. Then the tests run. Reports of all processes go to files; any report fails the
run. tools/sanitizers/thread.txt lists and explains suppressions.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "sanitize"
FILES = ROOT / "tools" / "sanitizers"
COPIED = ("patrickstar", "tests", "pyproject.toml")

# Tests of core parts almost without threads: AddressSanitizer only.
SINGLE_THREADED = [
    "tests/optim/test_adam_kernels.py",
    "tests/optim/test_loss_scaler.py",
    "tests/plan/test_planner.py",
    "tests/plan/test_simulator.py",
    "tests/checkpoint/test_crc32c.py",
    "tests/quant",
]
# Tests of core parts, then whole steps with threads: host updates, delayed transfers, memory requests of other threads,
# ranks, engines that end early.
TESTS = [
    "tests/memory",
    "tests/chunk",
    "tests/common",
    "tests/collective",
    "tests/optim/test_gradient_statistics.py",
    "tests/profiling/test_trace.py::test_models",
    "tests/engine/test_delays.py",
    "tests/engine/test_disk.py",
    "tests/engine/test_engine.py",
    "tests/engine/test_engine_lifetimes.py::test_engines_of_two_ranks",
    "tests/engine/test_memory_pressure.py",
    "tests/engine/test_quantized.py",
    "tests/engine/test_speculation.py",
    "tests/ranks/test_training.py",
]
# Tests that count the process's mappings or memory, which include the sanitizer's.
LEFT_OUT = ["tests/collective/test_messages.py::test_messages_that_python_reads"]

_REPORT = re.compile(r"^(?:==\d+==ERROR: |WARNING: ThreadSanitizer: |.*: runtime error: )", re.MULTILINE)
_PLACE = re.compile(r"(\S*csrc/\S+?:\d+)")
# Calls the fault argv[1]: of the library argv[2], or of the extension with wrong arguments.
_CALL = '''
import ctypes, sys, threading
name, path = sys.argv[1:]
library = (ctypes.PyDLL if name == "no_race_with_gil" else ctypes.CDLL)(path)

def on_two_threads(function):
    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=lambda: (barrier.wait(), function())) for _ in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()

def mean(numel, *, room, offset=0, num_ranks=1):
    """The mean of some zeros, and their memory of `room` numbers."""
    numbers, out = (ctypes.c_float * room)(), (ctypes.c_float * (numel + 1))()
    arguments = ctypes.addressof(numbers) + offset, num_ranks, ctypes.addressof(out), _C.DType.FLOAT32, numel
    return lambda: _C.collective.mean_of_ranks(*arguments), numbers, out

if name.startswith("extension_"):
    from patrickstar import _C
    if name == "extension_overflow":
        call, *memory = mean(1000, room=10)
    if name == "extension_misaligned":
        call, *memory = mean(10, room=11, offset=1)
    if name == "extension_race":  # at the end, of the results: a race that goes on takes long to report
        call, *memory = mean(100, room=4_000_000, num_ranks=40_000)
    on_two_threads(call) if name == "extension_race" else call()
elif name in ("race_of_python_threads", "no_race_with_gil"):
    on_two_threads(library.count)
else:
    getattr(library, name)()
'''


@dataclasses.dataclass(frozen=True)
class Sanitizer:
    """A sanitizer's build, environment and expected reports."""

    name: str
    library: str
    """Compiler library to preload."""
    also_preloaded: tuple[str, ...]
    """Sources in tools/sanitizers."""
    plugins: tuple[str, ...]
    """Modules in tools/sanitizers, loaded as pytest plugins."""
    tests: list[str]
    options: dict[str, str]
    """Environment variables; {folder} is the folder of reports."""
    faults: dict[str, str]
    """Calls of planted_faults.cpp or of the extension -> text of the report; empty: no report."""


# Leaks are not reported: Python and PyTorch leave much behind. An ASan error ends the process; the other sanitizers go
# on and report all errors. Python's fault handler must not catch a crash.
SANITIZERS = [
    Sanitizer(
        "address",
        "libasan.so",
        (),
        (),
        SINGLE_THREADED + TESTS,
        {
            "ASAN_OPTIONS": "log_path={folder}/address:detect_leaks=0:detect_stack_use_after_return=1:"
            "strict_string_checks=1:handle_abort=1",
            "UBSAN_OPTIONS": "log_path={folder}/undefined:print_stacktrace=1",
            "PYTHONMALLOC": "malloc",  # each Python object is an allocation of its own
        },
        {
            "heap_overflow": "heap-buffer-overflow",
            "use_after_free": "heap-use-after-free",
            "vector_index": "ABRT",
            "signed_overflow": "signed integer overflow",
            "misaligned_load": "misaligned address",
            "null_copy": "null pointer passed as argument",
            "float_cast": "outside the range of representable values",
            "extension_overflow": "heap-buffer-overflow",
            "extension_misaligned": "misaligned address",
            "no_fault": "",
        },
    ),
    Sanitizer(
        "thread",
        "libtsan.so",
        ("clocklock.cpp",),
        ("one_torch_thread",),
        TESTS,
        {
            # die_after_fork: tests fork with threads running. (Not ignore_noninstrumented_modules: GCC's then ignores
            # csrc's calls of memcpy and mutexes.)
            "TSAN_OPTIONS": f"log_path={{folder}}/thread:suppressions={FILES / 'thread.txt'}:exitcode=0:"
            "die_after_fork=0:second_deadlock_stack=1:history_size=5",
        },
        {
            "data_race": "data race",
            "copy_race": "data race",
            "lock_order": "lock-order-inversion",
            "race_of_python_threads": "data race",
            "extension_race": "data race",
            "no_race_with_gil": "",
            "no_fault": "",
        },
    ),
]


def compiler() -> str:
    """Returns the C++ compiler, which must be GCC: its libraries are found by name."""
    return os.environ.get("CXX", "c++")


def runtime_library(name: str) -> str:
    """Returns the path of a library of the compiler."""
    found = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        sys.exit(f"{compiler()} has no {name}; set CXX to a GCC that has, on Debian or Ubuntu: apt-get install g++")
    return found


def build(sanitizer: Sanitizer) -> Path:
    """Compiles the extension beside a copy of the package and its tests; returns that folder."""
    folder = FOLDER / sanitizer.name
    environment = os.environ | {"PATRICKSTAR_SANITIZE": sanitizer.name, "PATRICKSTAR_CUDA": "0"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext"]
    command += ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "objects")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy2(ROOT / name, tree / name)
    for name in sanitizer.plugins:
        shutil.copy2(FILES / f"{name}.py", tree)
    extension = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
    shutil.copy2(folder / "lib" / "patrickstar" / extension, tree / "patrickstar" / extension)
    return tree


def build_preloaded(sanitizer: Sanitizer) -> None:
    """Compiles the further preloaded libraries, without the sanitizer."""
    for name, library in zip(sanitizer.also_preloaded, preloaded(sanitizer), strict=True):
        command = [compiler(), "-shared", "-fPIC", "-std=c++17", "-O1", "-o", library, str(FILES / name)]
        subprocess.run(command, check=True)


def preloaded(sanitizer: Sanitizer) -> list[str]:
    """Returns the libraries of `also_preloaded`."""
    return [str(FOLDER / sanitizer.name / f"{Path(name).stem}.so") for name in sanitizer.also_preloaded]


def build_planted(sanitizer: Sanitizer) -> Path:
    """Compiles planted_faults.cpp with the extension's flags."""
    library = FOLDER / sanitizer.name / "planted_faults.so"
    code = "import patrickstar_recipe as r; print(*r.CXX_FLAGS, *r.LINK_FLAGS, sep='\\n')"
    environment = os.environ | {"PATRICKSTAR_SANITIZE": sanitizer.name, "PYTHONPATH": str(ROOT / "build_backend")}
    told = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    # -w: the planted faults cause warnings.
    command = [compiler(), "-shared", "-fPIC", "-std=c++17", *told.stdout.split(), "-w", "-o", str(library)]
    subprocess.run([*command, str(FILES / "planted_faults.cpp")], check=True)
    return library


def environment_of(sanitizer: Sanitizer, tree: Path, reports: Path) -> dict[str, str]:
    """Returns variables for Python with the sanitizer, importing from `tree`; reports go to `reports`, a new folder."""
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    options = {name: text.format(folder=reports) for name, text in sanitizer.options.items()}
    # The sanitizer looks up __cxa_throw at its start, so libstdc++ is preloaded too.
    libraries = [runtime_library(sanitizer.library), runtime_library("libstdc++.so.6"), *preloaded(sanitizer)]
    variables = {"LD_PRELOAD": " ".join(libraries), "PYTHONPATH": str(tree)}
    # Parallel tests have more threads than cores: none may spin.
    variables |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return os.environ | variables | options


def read_reports(folder: Path) -> list[str]:
    """Returns the sanitizers' reports; text without a known heading counts as one report."""
    found = []
    for path in sorted(folder.iterdir()):
        text = path.read_text(encoding="utf-8", errors="replace")
        starts = [match.start() for match in _REPORT.finditer(text)] or [0]
        found += [text[begin:end].strip(" =-\n") for begin, end in zip(starts, [*starts[1:], None], strict=True)]
    return [text for text in found if text]


def unmet_faults(sanitizer: Sanitizer, tree: Path) -> list[str]:
    """Returns one sentence for each planted fault without its expected report."""
    build_preloaded(sanitizer)
    library = build_planted(sanitizer)
    complaints = []
    for name, expected in sanitizer.faults.items():
        reports = FOLDER / sanitizer.name / "planted" / name
        environment = environment_of(sanitizer, tree, reports)
        command = [sys.executable, "-c", _CALL, name, str(library)]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        found = read_reports(reports)
        place = "csrc/collective/rank_mean.cpp" if name.startswith("extension_") else "planted_faults.cpp"
        if expected and not any(expected in text and place in text for text in found):
            complaints.append(f"{name} is not reported as {expected!r}: {found or done.stderr}")
        if not expected and found:
            complaints.append(f"{name} has a report: {found}")
    return complaints


def check_import(tree: Path, environment: dict[str, str]) -> None:
    """Exits unless Python imports the extension in `tree`."""
    code = "import patrickstar._C; print(patrickstar._C.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode != 0 or tree not in Path(done.stdout.strip()).parents:
        sys.exit(f"sanitize: not the extension in {tree} was imported: {done.stdout}{done.stderr}")


def run_tests(tree: Path, environment: dict[str, str], arguments: list[str]) -> tuple[int, str]:
    """Returns pytest's exit status and last line."""
    # pytest's fault handler would run before the sanitizer's.
    command = [sys.executable, "-m", "pytest", "-p", "no:faulthandler", "-p", "no:cacheprovider", *arguments]
    last = ""
    with subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return process.returncode, last


def show(reports: list[str]) -> None:
    """Prints reports, one per place."""
    places: dict[str, list[str]] = {}
    for text in reports:
        place = _PLACE.search(text)
        kind = re.sub(r"\(pid=\d+\)|\b\d+==|0x[0-9a-f]+", "", text.splitlines()[0])
        places.setdefault(f"{kind} {place.group(1) if place else ''}", []).append(text)
    for same in places.values():
        print(f"\n{len(same)} like this:\n{same[0]}")


def run(sanitizer: Sanitizer, arguments: list[str]) -> tuple[bool, str]:
    """Returns (success, a line about it)."""
    begun = time.monotonic()
    tree = build(sanitizer)
    built = time.monotonic()
    print(f"=== {sanitizer.name}: built in {built - begun:.0f} s", flush=True)
    complaints = unmet_faults(sanitizer, tree)
    print(*complaints, sep="\n", end="\n" if complaints else "")
    folder = FOLDER / sanitizer.name / "reports"
    environment = environment_of(sanitizer, tree, folder)
    check_import(tree, environment)
    left_out = [f"--deselect={test}" for test in LEFT_OUT]
    chosen = [] if any(argument.startswith("tests") for argument in arguments) else [*left_out, *sanitizer.tests]
    plugins = [argument for name in sanitizer.plugins for argument in ("-p", name)]
    status, last = run_tests(tree, environment, [*plugins, *arguments, *chosen])
    reports = read_reports(folder)
    show(reports)
    planted = sum(bool(expected) for expected in sanitizer.faults.values())
    seen = f"{len(complaints)} planted faults NOT as expected" if complaints else f"{planted} planted faults reported"
    line = f"{sanitizer.name}: {seen}; {last.strip(' =')}; {len(reports)} reports"
    return not (complaints or status or reports), line


def main() -> None:
    """Parses the command line, runs the sanitizers and exits with 1 on any report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=[sanitizer.name for sanitizer in SANITIZERS], help="one of the sanitizers")
    parser.add_argument("--jobs", default="2", help="tests at a time")
    options, arguments = parser.parse_known_args()
    arguments = ["-n", options.jobs, "--dist", "worksteal", *arguments]
    outcomes = [run(sanitizer, arguments) for sanitizer in SANITIZERS if options.only in (None, sanitizer.name)]
    print("\n".join(line for _, line in outcomes))
    sys.exit(0 if all(well for well, _ in outcomes) else 1)


if __name__ == "__main__":
    main()

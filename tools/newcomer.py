"""Clones HEAD and runs README.md's commands and blocks, top to bottom, in an empty home, as a newcomer would.

    tools/newcomer.sh              # in a temporary folder, which is removed
    tools/newcomer.sh FOLDER       # in FOLDER, which must be empty or missing, and stays: FOLDER/work has the clone
    tools/newcomer.sh --wheel dist/patrickstar-0.7.0+cpu-cp311-cp311-manylinux_2_35_x86_64.whl

With --wheel nothing is cloned: the blocks are those of docs/installation.md, in a folder whose dist/ has the wheel. The
run fails unless most of the trained model's answers are those of held-out questions.

`git clone` gets this checkout, so uncommitted changes are not seen. All `bash` blocks run in one shell. A `python`
block is a script, run by that shell's `python` in the shell's folder. The run stops at the first failure. Blocks in
other languages are not run. A block after `<!-- newcomer: GPU -->` or `<!-- not run: reason -->` is listed and not run.

The home is empty. The environment has only PATH, the language, and pip's index settings (PIP_*, proxies, certificates).
`python3` is a fresh one without this machine's packages. Standard library only.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = "README.md"
INSTALLATION = "docs/installation.md"

_BLOCK = re.compile(r"^```(\S*)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_REMARK = re.compile(r"<!--\s*(newcomer|not run):\s*(.+?)\s*-->\s*\Z", re.DOTALL)
_HIDDEN = re.compile(r"<!--(?:(?!-->).)*?^```.*?-->", re.MULTILINE | re.DOTALL)
_CLONE = re.compile(r"git clone (?:\S+ )*?([^\s&;|<>]+[:/][^\s&;|<>]+)")
_KEPT = re.compile(
    r"PATH|LANG|LC_ALL|TZ|PIP_.*|(http|https|no|all)_proxy|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE", re.I
)
_RIGHT = re.compile(r"(\d+) of (\d+) answers are the held-out ones")
_SHOWN = {"text", "output", "json"}
_NOT_SOURCE = (".venv", ".cache", "build", "dist", "__pycache__", "*.so", "*.egg-info", ".*_cache", ".hypothesis")

# Prints a command's line and text before it, its exit status and duration after it.
_SHELL = """
newcomer_run() {
  printf '\\n=== %s $ %s\\n' "$1" "$2"
  local begun=$SECONDS status=0
  eval "$3" </dev/null || status=$?
  if [ "$status" -eq 0 ]; then
    printf '=== %s: passed in %d s\\n' "$1" $((SECONDS - begun))
  else
    printf '=== %s: FAILED with status %d after %d s\\n' "$1" "$status" $((SECONDS - begun))
    exit 1
  fi
}
"""


@dataclasses.dataclass(frozen=True)
class Step:
    """A command of a `bash` block, a `python` block, or a block that is not run."""

    line: int
    """First line in the page, from 1."""
    language: str
    text: str
    not_run: str | None = None
    """Reason for not running it; None: it runs."""


def commands(text: str) -> Iterator[tuple[int, str]]:
    """Yields the commands of a block with the number of lines before each; a command may span lines."""
    pending: list[str] = []
    for number, line in enumerate(text.splitlines()):
        if not pending and (not line.strip() or line.lstrip().startswith("#")):
            continue
        pending.append(line)
        whole = "\n".join(pending)
        checked = subprocess.run(["bash", "-n", "-c", whole], capture_output=True, text=True, env={"LC_ALL": "C"})
        if not (line.endswith("\\") or checked.returncode or "here-document" in checked.stderr):
            yield number - len(pending) + 1, whole
            pending = []
    if pending:
        yield len(text.splitlines()) - len(pending), "\n".join(pending)  # the shell reports the error


def steps(page: str, name: str = README) -> Iterator[Step]:
    """Yields the steps of the page `name` in order. Exits if a block has no language or an unknown one."""
    visible = _HIDDEN.sub(lambda hidden: "\n" * hidden.group().count("\n"), page)
    for block in _BLOCK.finditer(visible):
        language, text = block.groups()
        line = visible.count("\n", 0, block.start()) + 2
        remark = _REMARK.search(visible[: block.start()])
        if language in _SHOWN:
            continue
        if language not in ("bash", "python"):
            known = ", ".join(["bash", "python", *sorted(_SHOWN)])
            sys.exit(f"newcomer: {name}:{line - 1}: a block of {language or 'no language'}; give one of {known}")
        if remark is not None:
            reason = "it needs a GPU" if remark.groups() == ("newcomer", "GPU") else remark.group(2)
            yield Step(line, language, text.rstrip("\n"), not_run=reason)
        elif language == "python":
            yield Step(line, language, text)
        else:
            for before, command in commands(text):
                yield Step(line + before, language, command)


def script(todo: list[Step], folder: Path, name: str = README) -> str:
    """Returns the shell script of these steps of the page `name`; writes Python scripts to `folder`."""
    lines = [_SHELL]
    for step in todo:
        place, shown = f"{name}:{step.line}", step.text
        if step.not_run is not None:
            lines.append(f"printf '\\n=== %s: not run: %s\\n%s\\n' {shlex.join([place, step.not_run, step.text])}")
            continue
        command = step.text
        if step.language == "python":
            file = folder / f"{Path(name).stem.lower()}_line_{step.line}.py"
            file.write_text(step.text, encoding="utf-8")
            shown = command = f"python {shlex.quote(str(file))}"
        lines.append(f"newcomer_run {shlex.join([place, shown, command])}")
    return "\n".join(lines) + "\n"


def origin(folder: Path) -> Path:
    """Returns the repository to clone: this checkout. If git finds no history, or does not trust its owner, a
    repository of its files is made in `folder`.
    """
    shown = git(ROOT, "rev-parse", "--show-toplevel", check=False)
    if shown.returncode == 0 and Path(shown.stdout.strip()).resolve() == ROOT:
        return ROOT
    made = folder / "origin"
    shutil.copytree(ROOT, made, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_SOURCE))
    git(made, "init", "-q")
    git(made, "add", "--all")
    git(made, "-c", "user.name=newcomer", "-c", "user.email=newcomer@localhost", "commit", "-q", "-m", "as unpacked")
    return made


def git(folder: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs git in `folder`."""
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=check)


def shell_environment(folder: Path) -> dict[str, str]:
    """Returns the variables of a newcomer's shell, with home and Python in `folder`."""
    kept = {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)}
    active = os.environ.get("VIRTUAL_ENV")
    path = [part for part in kept["PATH"].split(os.pathsep) if not active or part != f"{active}/bin"]
    return kept | {"PATH": os.pathsep.join([str(folder / "python" / "bin"), *path]), "HOME": str(folder / "home")}


def newcomers_environment(folder: Path, page: str, cloned: Path) -> dict[str, str]:
    """Returns `shell_environment`, in which git maps the README's address to `cloned`."""
    kept = shell_environment(folder)
    settings = {f"url.{cloned.as_uri()}.insteadOf": address for address in _CLONE.findall(page)[:1]}
    if not settings:
        sys.exit(f"newcomer: {README} has no `git clone ADDRESS`, with which everything begins")
    for number, (name, value) in enumerate(settings.items()):
        kept |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
    return kept | {"GIT_CONFIG_COUNT": str(len(settings))}


def has_learned(printed: str) -> bool:
    """True if most answers of the trained model are right, and not those of the untrained one."""
    found = [(int(equal), int(asked)) for equal, asked in _RIGHT.findall(printed)]
    return len(found) > 1 and 2 * found[0][0] < found[0][1] and 2 * found[-1][0] > found[-1][1]


def run(folder: Path, minutes: float, wheel: Path | None = None) -> int:
    """Runs all steps in `folder`; returns the exit status."""
    started = time.monotonic()
    for name in ("home", "work", "blocks"):
        (folder / name).mkdir(parents=True)
    venv.create(folder / "python", with_pip=wheel is None)
    if wheel is None:
        name, cloned = README, origin(folder)
        page = git(cloned, "show", f"HEAD:{README}").stdout
        environment = newcomers_environment(folder, page, cloned)
    else:
        name, page = INSTALLATION, (ROOT / INSTALLATION).read_text(encoding="utf-8")
        environment = shell_environment(folder)
        (folder / "work" / "dist").mkdir()
        shutil.copy(wheel, folder / "work" / "dist")
    todo = list(steps(page, name))
    file = folder / "blocks" / f"{Path(name).stem.lower()}.sh"
    file.write_text(script(todo, folder / "blocks", name), encoding="utf-8")
    print(f"newcomer: {len(todo)} steps of {name} in {folder / 'work'}; PATH={environment['PATH']}", flush=True)
    print(f"newcomer: processors {len(os.sched_getaffinity(0))}, load {os.getloadavg()[0]:.1f}", flush=True)
    shell = subprocess.Popen(
        ["bash", "--noprofile", "--norc", str(file)],
        cwd=folder / "work",
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(60 * minutes, lambda: os.killpg(shell.pid, 9))
    timer.start()
    printed = []
    try:
        for line in shell.stdout:
            print(line, end="", flush=True)
            printed.append(line)
        status: int | str = shell.wait()
    finally:
        late = not timer.is_alive()
        timer.cancel()
        if shell.poll() is None:
            os.killpg(shell.pid, 9)
    if late:
        status = f"it took more than {minutes:g} minutes"
    elif wheel is not None and status == 0 and not has_learned("".join(printed)):
        status = "the trained model does not answer held-out questions"
    left_out = sum(step.not_run is not None for step in todo)
    verdict = "passed" if status == 0 else "FAILED"
    print(f"\nnewcomer: {verdict}" + (f", {left_out} of {len(todo)} not run" if left_out else ""), flush=True)
    print(f"newcomer: {time.monotonic() - started:.0f} s from an empty home to the end of {name}", flush=True)
    if isinstance(status, str):
        print(f"newcomer: {status}")
    return int(status != 0)


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="empty or missing; it stays (default: a temporary one)")
    parser.add_argument("--minutes", type=float, default=20, help="how long all of it may take")
    parser.add_argument("--wheel", type=Path, help=f"install this one, as {INSTALLATION} says it; nothing is cloned")
    options = parser.parse_args()
    if options.wheel is not None and not options.wheel.is_file():
        sys.exit(f"newcomer: {options.wheel} is no file; make wheel builds one")
    if options.folder is None:
        folder = Path(tempfile.mkdtemp(prefix="newcomer-"))
        try:
            return run(folder, options.minutes, options.wheel)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if options.folder.exists() and any(options.folder.iterdir()):
        sys.exit(f"newcomer: {options.folder} is not empty; name a folder that is, or one that is not there")
    return run(options.folder.resolve(), options.minutes, options.wheel)


if __name__ == "__main__":
    sys.exit(main())

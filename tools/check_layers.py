"""Checks includes between the files of csrc against the layers of docs/architecture.md.

    python3 tools/check_layers.py [ROOT]

Prints every violation; exits with 1 if there are any. Standard library only.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "build_backend"))

from patrickstar_recipe import ISA_FILE  # noqa: E402

# A folder includes itself and lower layers; folders of one layer never include each other.
LAYERS = {
    "common": 0,
    "torch_api": 1,
    "torch_shim": 2,
    "memory": 2,
    "backend": 2,
    "chunk": 3,
    "trace": 4,
    "optim": 4,
    "quant": 4,
    "experts": 4,
    "fp8": 4,
    "collective": 4,
    "plan": 5,
    "engine": 6,
    "bind": 7,
}
CUDA_PART = ("cuda_", "nccl_")
CUDA_MACRO = "PATRICKSTAR_WITH_CUDA"
SUFFIXES = (".h", ".inl", ".cpp", ".cu")

_INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]')
_CUDA_HEADER = re.compile(r"cuda|nccl|cub/|thrust/|cooperative_groups|driver_types\.h|vector_types\.h")
_TORCH_HEADER = re.compile(r"torch/|ATen/|caffe2/|c10/")
_SHIM = "torch_shim/"
_PYTHON_HEADER = re.compile(r"nanobind/|Python\.h")
# [Note: ISA files] in csrc/optim/cpu_isa.h: no header that could emit code shared with other files.
_ISA_HEADERS = {"immintrin.h", "arm_neon.h", "arm_sve.h", "cstdint", "cstddef"}


@dataclasses.dataclass(frozen=True)
class Include:
    """One #include line."""

    line: int
    header: str
    ours: bool
    """True for a file of csrc, included with quotes."""
    needs_cuda: bool
    """True if only the CUDA build includes it."""


def read_includes(file: Path) -> list[Include]:
    """Returns the #include lines of a file, with the preprocessor conditions around them."""
    conditions: list[bool] = []  # for each open #if: True if the branch needs the CUDA part
    includes = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        directive = re.match(r"\s*#\s*(ifdef|ifndef|if|elif|else|endif)\b(.*)", line)
        if directive:
            word, rest = directive.groups()
            if word in ("ifdef", "if"):
                conditions.append(CUDA_MACRO in rest and "!" not in rest)
            elif word == "ifndef":
                conditions.append(False)
            elif word in ("elif", "else") and conditions:
                conditions[-1] = False
            elif word == "endif" and conditions:
                conditions.pop()
        include = _INCLUDE.match(line)
        if include:
            includes.append(Include(number, include.group(2), include.group(1) == '"', any(conditions)))
    return includes


class Checker:
    """The files of a csrc folder and their violations."""

    def __init__(self, csrc: Path):
        self.csrc = csrc
        files = [path for path in sorted(csrc.rglob("*")) if path.suffix in SUFFIXES]
        self.includes = {path.relative_to(csrc).as_posix(): read_includes(path) for path in files}
        self.violations: list[str] = []

    def check(self) -> list[str]:
        """Returns all violations as "file:line: what, why"."""
        for name, includes in self.includes.items():
            folder = name.partition("/")[0]
            if folder not in LAYERS or "/" not in name:
                layers = ", ".join(LAYERS)
                self.violations.append(f"csrc/{name}:1: {folder} is no layer; put the file into one of {layers}")
                continue
            for include in includes:
                self._check_layer(name, include)
                self._check_library(name, include)
            if ISA_FILE.fullmatch(name.rpartition("/")[2]):
                allowed = "|".join(map(re.escape, sorted(_ISA_HEADERS)))
                self._check_reach(name, re.compile(rf"(?!(?:{allowed})$)"), "see [Note: ISA files] in optim/cpu_isa.h")
        return self.violations

    def _report(self, name: str, include: Include, why: str) -> None:
        self.violations.append(f"csrc/{name}:{include.line}: includes {include.header}, {why}")

    def _check_layer(self, name: str, include: Include) -> None:
        if not include.ours:
            return
        folder, other = name.partition("/")[0], include.header.partition("/")[0]
        if include.header not in self.includes:
            self._report(name, include, "which is not in csrc; quotes are for our own files, by their path from csrc")
        elif folder != other and LAYERS[other] == LAYERS[folder]:
            self._report(name, include, f"but {folder} and {other} are siblings in layer {LAYERS[folder]}")
        elif LAYERS[other] > LAYERS[folder]:
            self._report(name, include, f"but {folder} is layer {LAYERS[folder]} and {other} is {LAYERS[other]}")

    def _check_library(self, name: str, include: Include) -> None:
        if include.ours:
            return
        base = name.rpartition("/")[2]
        if _TORCH_HEADER.match(include.header) and not name.startswith(_SHIM):
            self._report(name, include, "but the core is compiled without PyTorch: only torch_shim/ may")
        if _PYTHON_HEADER.match(include.header) and not name.startswith("bind/"):
            self._report(name, include, "but Python is for bind/ alone")
        is_cuda = _CUDA_HEADER.match(include.header.removeprefix("c10/"))
        if is_cuda and base.endswith(".cpp") and not base.startswith(CUDA_PART) and not include.needs_cuda:
            self._report(name, include, f"but only {'*, '.join(CUDA_PART)}* files and #ifdef {CUDA_MACRO} may")

    def _check_reach(self, name: str, forbidden: re.Pattern[str], why: str) -> None:
        """Reports library headers matching `forbidden` that `name` includes, directly or through headers of csrc."""
        seen, queue = {name}, [name]
        while queue:
            current = queue.pop()
            for include in self.includes.get(current, []):
                if include.ours and include.header not in seen:
                    seen.add(include.header)
                    queue.append(include.header)
                elif not include.ours and forbidden.match(include.header):
                    self._report(current, include, f"and csrc/{name} includes that file; {why}")


def check(root: Path) -> list[str]:
    """Returns the violations in the repository `root`."""
    return Checker(root / "csrc").check()


def main() -> None:
    """Prints violations; exits with 1 if there are any."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    violations = check(root)
    if violations:
        sys.exit("\n".join(violations))
    print(f"check_layers: {len(Checker(root / 'csrc').includes)} files of csrc keep to their layers")


if __name__ == "__main__":
    main()

"""Checks the imports among patrickstar's modules: layers of rooms (docs/architecture.md), and no import circles.

    python3 tools/check_imports.py [ROOT]

Prints every violation and exits with 1 if there is one. Standard library only.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

# A room imports itself and lower layers; rooms of one layer never import each other. Files beside the rooms
# (patrickstar/zero.py, patrickstar/plan.py and so on) are names and commands for users: they import any room, and no
# room imports them. The same holds for a room's __main__.py.
LAYERS = {
    "config": 0,
    "diagnostics": 0,
    "ranks": 0,
    "torch_shim": 0,
    "checkpoint": 1,
    "elastic": 1,
    "fp8": 1,
    "lr_schedules": 1,
    "machine": 1,
    "monitor": 1,
    "profiling": 1,
    "sequence": 1,
    "tensor2d": 1,
    "module": 2,
    "optimizer": 2,
    "activations": 3,
    "experts": 3,
    "parallel": 4,
    "planning": 4,
    "session": 5,
    "state": 6,
    "resize": 7,
    "engine": 8,
    "runtime": 9,
    "deepspeed": 10,
    "integrations": 11,
    "ones": 11,
    "command": 12,
    "finetune": 13,
}
# Below all rooms: imports nothing of the package, and any module imports it.
FOR_ALL = ("choices", "differentiation", "sizes")
NAMES_OF_USERS = ("checkpointing", "comm", "env", "ops", "plan", "profile", "utils", "zero")
PACKAGE = "patrickstar"
EXTENSION = "_C"


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module of the package."""

    line: int
    name: str
    """Dotted, below the package."""
    for_types: bool
    """True under ``if TYPE_CHECKING``."""


@functools.cache
def imports(file: Path) -> tuple[Import, ...]:
    """The package's modules that a file imports, at module level, in functions and for types."""
    return tuple(_imports(ast.parse(file.read_text(encoding="utf-8"))))


def _imports(tree: ast.AST) -> Iterator[Import]:
    nodes = list(ast.walk(tree))
    for_types = {
        id(node)
        for branch in nodes
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for child in branch.body
        for node in ast.walk(child)
    }
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == PACKAGE and rest:
                yield Import(node.lineno, rest, id(node) in for_types)


def check_rooms(root: Path) -> list[str]:
    """The violations of layers in the repository ``root``, as "file:line: import, reason"."""
    violations = []
    package = root / PACKAGE
    for file in sorted(package.rglob("*.py")):
        place = file.relative_to(package).as_posix()
        room = place.partition("/")[0].removesuffix(".py")
        if room in (*NAMES_OF_USERS, "__init__") or file.name == "__main__.py":
            continue
        if room not in (*LAYERS, *FOR_ALL):
            rooms = ", ".join(LAYERS)
            violations.append(f"{PACKAGE}/{place}:1: {room} is no room; put the module into one of {rooms}")
            continue
        seen: set[tuple[int, str]] = set()
        for found in imports(file):
            other = found.name.partition(".")[0]
            if other in (room, EXTENSION, "__version__", *FOR_ALL) or (found.line, other) in seen:
                continue
            seen.add((found.line, other))
            if room in FOR_ALL:
                why = f"but {room} is below all rooms"
            elif other not in LAYERS:
                why = f"but {other} is a name of users, which imports rooms and not the other way round"
            elif LAYERS[other] == LAYERS[room]:
                why = f"but {room} and {other} are siblings in layer {LAYERS[room]}"
            elif LAYERS[other] > LAYERS[room]:
                why = f"but {room} is layer {LAYERS[room]} and {other} is {LAYERS[other]}"
            else:
                continue
            violations.append(f"{PACKAGE}/{place}:{found.line}: imports {found.name}, {why}")
    return violations


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan), each sorted."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == order[node]:
            circle = [stack.pop()]
            while circle[-1] != node:
                circle.append(stack.pop())
            if len(circle) > 1:
                found.append(sorted(circle))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def check_circles(root: Path) -> list[str]:
    """Import circles in the repository ``root``. Imports in functions count; so do imports for types.

    The package's own ``__init__.py`` does not count: it imports names when they are first used.
    """
    package = root / PACKAGE
    files = {}
    for file in sorted(package.rglob("*.py")):
        files[".".join(file.relative_to(package).with_suffix("").parts).removesuffix(".__init__")] = file
    files.pop("__init__", None)
    graph: dict[str, set[str]] = {}
    typed: dict[str, set[str]] = {}
    for name, file in files.items():
        graph[name], typed[name] = set(), set()
        for found in imports(file):
            other = found.name
            while other not in files and "." in other:
                other = other.rpartition(".")[0]
            if other in files and other != name:
                (typed if found.for_types else graph)[name].add(other)
    run = circles(graph)
    for_types = circles({name: graph[name] | typed[name] for name in graph})
    shown = [(circle, "import each other") for circle in run]
    shown += [(circle, "import each other for types") for circle in for_types if not run]
    return [f"{PACKAGE}: {', '.join(circle)} {what}; move what they share below them" for circle, what in shown]


def check(root: Path) -> list[str]:
    """All violations in the repository ``root``."""
    return check_rooms(root) + check_circles(root)


def main() -> None:
    """Prints violations; exits with 1 if there are some."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    violations = check(root)
    if violations:
        sys.exit("\n".join(violations))
    count = len(list((root / PACKAGE).rglob("*.py")))
    print(f"check_imports: {count} modules of {PACKAGE} keep to their rooms, without circles")


if __name__ == "__main__":
    main()

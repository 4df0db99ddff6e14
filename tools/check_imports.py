"""Checks imports between the modules of patrickstar against the layers of rooms (docs/design.md).

    python3 tools/check_imports.py [ROOT]

Prints every violation; exits with 1 if there are any. Standard library only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

# A room imports itself and lower layers; rooms of one layer never import each other. Modules beside the rooms
# (patrickstar/zero.py, patrickstar/plan.py) and every __main__.py are entry points: they import anything, and no room
# imports them.
LAYERS = {
    "config": 0,
    "diagnostics": 0,
    "ranks": 0,
    "checkpoint": 1,
    "elastic": 1,
    "lr_schedules": 1,
    "machine": 1,
    "monitor": 1,
    "profiling": 1,
    "sequence": 1,
    "tensor2d": 1,
    "module": 2,
    "optimizer": 2,
    "planning": 3,
    "engine": 4,
    "runtime": 5,
    "deepspeed": 6,
    "integrations": 7,
    "ones": 7,
    "command": 8,
}
# Below all rooms: standard library only, imported by any room.
FOR_ALL = ("sizes",)
NAMES_OF_USERS = ("checkpointing", "comm", "env", "ops", "plan", "profile", "utils", "zero")
PACKAGE = "patrickstar"
EXTENSION = "_C"


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and dotted name of each import of the package, also within functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == PACKAGE:
            names = [f"{PACKAGE}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == PACKAGE and rest:
                yield node.lineno, rest


def check(root: Path) -> list[str]:
    """Returns the violations in the repository ``root`` as "file:line: what, why"."""
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
        for line, name in imports(file):
            other = name.partition(".")[0]
            if other in (room, EXTENSION, "__version__", *FOR_ALL):
                continue
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
            violations.append(f"{PACKAGE}/{place}:{line}: imports {name}, {why}")
    return violations


def main() -> None:
    """Prints violations; exits with 1 if there are any."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    violations = check(root)
    if violations:
        sys.exit("\n".join(violations))
    print(f"check_imports: {len(list((root / PACKAGE).rglob('*.py')))} modules of {PACKAGE} keep to their rooms")


if __name__ == "__main__":
    main()

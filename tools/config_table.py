"""Writes docs/config.md from patrickstar/config/schema.py: every key, its type, its default, and what happens to it.

    python tools/config_table.py > docs/config.md

tests/test_config.py compares the two. Standard library only; reads the source, so that it needs no build.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "patrickstar" / "config" / "schema.py"

DEFAULT_CHOICES = {"OptimizerType": '"Adam"', "Speculation": '"auto"', "Streaming": '"never"', "HostAffinity": '"auto"'}

HEADER = """# Configuration

`initialize_engine(model_func, local_rank, config)` takes a dict with the keys below, or None for the defaults. Unknown
keys, wrong types and impossible values are refused before the model is built, an unknown key with the nearest known
one. This file is made by `tools/config_table.py` from the docstrings of `patrickstar/config/schema.py`.
"""


def parse_classes(source: str) -> dict[str, list[tuple[str, str, str, str]]]:
    """Of each dataclass: (field, type, default, docstring) in order."""
    classes = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or not any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            continue
        fields = []
        for field, doc in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign):
                text = " ".join(doc.value.value.split())
                fields.append((field.target.id, ast.unparse(field.annotation), ast.unparse(field.value), text))
        classes[node.name] = fields
    return classes


def tables(classes: dict[str, list[tuple[str, str, str, str]]], name: str, path: str) -> list[str]:
    """The section's table, then those of the sections in it."""
    title = f"## `{path}`" if path else "## Top level"
    lines = ["", title, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    sections = []
    for field, kind, default, text in classes[name]:
        section = kind.removesuffix(" | None")
        if section in classes:
            sections.append((section, f"{path}.{field}" if path else field))
            kind, default = "section", "None" if kind != section else "its defaults"
        if kind in DEFAULT_CHOICES:
            kind, default = "str", DEFAULT_CHOICES[kind]
        elif field.endswith("_memory"):
            kind = "int | str | None"
        lines.append(f"| `{field}` | {kind.replace(' | ', ' or ')} | {default} | {text.replace('``', '`')} |")
    for section, section_path in sections:
        lines += tables(classes, section, section_path)
    return lines


def render() -> str:
    """The whole page."""
    classes = parse_classes(SOURCE.read_text(encoding="utf-8"))
    return HEADER + "\n".join(tables(classes, "Config", "")) + "\n"


if __name__ == "__main__":
    print(render(), end="")

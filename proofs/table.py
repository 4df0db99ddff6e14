"""Writes the tables of docs/reliability.md from recorded results: ``python -m proofs table``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from proofs import results

PAGE = results.ROOT / "docs" / "reliability.md"
RECORDED = results.ROOT / "benchmark" / "results" / "proofs"
BEGIN, END = "<!-- begin: python -m proofs table -->\n", "<!-- end -->\n"
ORDER = ("crash", "flips", "io", "memory", "interrupts", "ranks", "races", "soak")


def rows(found: list[dict[str, Any]]) -> list[str]:
    """One row for each proof."""
    lines = ["| proof | promise | tried | planted bugs found | result |", "|---|---|---|---|---|"]
    for result in sorted(found, key=lambda each: ORDER.index(each["proof"])):
        planted = f"{sum(bool(each['found']) for each in result['planted'])} of {len(result['planted'])}"
        tried = f"{result['points']:,} {result['kind']} in {max(round(result['seconds'] / 60), 1)} min"
        told = "holds" if result["holds"] else "**fails**"
        lines.append(f"| `make prove-{result['proof']}` | {result['claim']} | {tried} | {planted} | {told} |")
    return lines


def origins(found: list[dict[str, Any]]) -> list[str]:
    """Command, commit, date, hardware and versions of each result, those that are equal together."""
    lines = []
    for fields in dict.fromkeys(_origin(result) for result in found):
        commands = ", ".join(f"`{result['command']}`" for result in found if _origin(result) == fields)
        commit, date, hardware, versions = fields
        told = f"* Commit {commit}, {date}; {hardware}; {versions}: {commands}."
        lines += textwrap.wrap(told, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return lines


def _origin(result: dict[str, Any]) -> tuple[str, str, str, str]:
    return tuple(result[field] for field in ("commit", "date", "hardware", "versions"))  # type: ignore[return-value]


def text(folder: Path = RECORDED) -> str:
    """The generated part of the page."""
    found = results.read(folder)
    return "\n".join([*rows(found), "", *origins(found), ""])


def write() -> None:
    """Replaces the generated part of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + text() + END + rest.partition(END)[2])

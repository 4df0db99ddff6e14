"""Pages of the documentation: fenced blocks, links, and Python blocks as one script."""

import dataclasses
import re
import subprocess
from pathlib import Path

from tests.distributed import ROOT, run_python

DOCS = ROOT / "docs"

_FENCE = re.compile(r"^```(\S*)[^`\n]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    language: str
    """The first word after the opening fence, or empty."""
    text: str
    line: int
    """Line number of the first line, from 1."""
    not_run: str | None
    """The reason in a comment ``<!-- not run: reason -->`` just before it, or None."""


@dataclasses.dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def blocks(self, *languages: str) -> list[Block]:
        text = self.text
        found = [
            Block(
                language=match.group(1),
                text=match.group(2),
                line=text.count("\n", 0, match.start()) + 2,
                not_run=reason.group(1) if (reason := _NOT_RUN.search(text[: match.start()])) else None,
            )
            for match in _FENCE.finditer(text)
        ]
        return [block for block in found if not languages or block.language in languages]

    def script(self) -> str:
        """The Python blocks that are to be run, each on its lines of the page."""
        lines: list[str] = []
        for block in self.blocks("python"):
            if block.not_run is None:
                lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
        return "\n".join(lines) + "\n" if lines else ""

    def links(self) -> list[str]:
        return re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", self.text))

    def anchors(self) -> set[str]:
        """Headings as GitHub spells them."""
        headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", self.text), re.MULTILINE)
        plain = [re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading)).lower() for heading in headings]
        return {heading.strip().replace(" ", "-") for heading in plain}


def all_pages() -> list[Page]:
    return [Page(path) for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]]


def run_page(page: Page, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / page.name.replace("/", "-").replace(".md", ".py")
    script.write_text(page.script(), encoding="utf-8")
    environment = {"HOME": str(folder), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return run_python(script, cwd=folder, environment=environment)


def shows(output: str, excerpt: str) -> bool:
    """True if ``output`` has the lines of ``excerpt`` in order. ``…`` stands for any text within a line, and alone for
    any lines.
    """
    patterns = [re.escape(line).replace("…", ".*") + "\n" for line in excerpt.splitlines()]
    pattern = "".join("(?:.*\n)*?" if line == ".*\n" else line for line in patterns)
    return re.search("^" + pattern, output, re.MULTILINE) is not None

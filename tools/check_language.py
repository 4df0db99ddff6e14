"""Checks comments, docstrings and pages for the wording rules of CONTRIBUTING.md.

    python3 tools/check_language.py [ROOT]

Rejects:

* a docstring or comment that begins with one of ``FIRST_WORDS``;
* a sentence of more than ``MOST_WORDS`` words in a comment, docstring or page;
* a word of ``WORDS``, for which the field has a common term;
* a path of this repository, or a C++ ``Class::member``, that a comment names and that does not exist.

Prints every violation; exits with 1 if there are any. Standard library only.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FIRST_WORDS = ("Of", "What", "As", "It", "They", "That", "Those", "Whether")
MOST_WORDS = 30
# Pattern, the term to use instead, and where the rule holds (a path's beginning).
WORDS = (
    (r"\b[Tt]ides?\b", "activation memory", ""),
    (r"\b[Pp]ayloads?\b", "chunk buffer", "csrc/engine"),
    (r"\b[Vv]acated?\b", "evict all", ""),
    (r"\b[Tt]enants?\b", "memory client", "csrc"),
    (r"\bat home on\b", "resting on", ""),
    (r"\b[Ss]tash(es|ed)?\b", "offload store, offloaded", ""),
    (r"\b[Vv]isit(s|ors?|ing)?\b", "round trip", "csrc"),
    (r"\b[Tt]aken back\b", "rolled back", "csrc"),
    (r"\b[Ss]ettled values?\b", "scale-independent value", ""),
    (r"\b[Kk]ept attention\b", "selective recomputation of attention", ""),
    (r"\b[Ee]verybody\b", "world group, all ranks", ""),
    (r"\b[Uu]ndivided\b", "unsharded", ""),
    (r"\b(computed|run) again in backward\b", "recomputed", ""),
)
CODE = {".h", ".inl", ".cpp", ".cu", ".py", ".pyi"}
FOLDERS = ("csrc", "patrickstar", "build_backend", "tools", "benchmark", "examples", "proofs", "tests")
# A page of what was tried, with the words of its time.
EXEMPT = ("docs/log.md", "tools/check_language.py", "docs/compatibility.md", "docs/refused_models.md")

_PATH = re.compile(
    r"(?<![\w/.])(?:csrc/|patrickstar/|tests/|benchmark/|docs/|tools/|examples/|proofs/)[\w/]+\.(?:h|cpp|cu|inl|py|md|txt|json)\b"
)
_MEMBER = re.compile(r"\b([A-Z][A-Za-z0-9]+)::([A-Za-z_]\w*)")
_NOT_PROSE = re.compile(r"```.*?```|``[^`]*``|`[^`]*`|\[([^\]]*)\]\([^)]*\)|https?://\S+", re.S)


@dataclasses.dataclass(frozen=True)
class Text:
    """A comment, docstring or paragraph. ``line`` counts from 1."""

    file: str
    line: int
    text: str


def check(root: Path) -> list[str]:
    """Returns one line per violation."""
    names = _names(root)
    faults = []
    for text in _texts(root):
        where = f"{text.file}:{text.line}"
        words = text.text.split()
        is_page = text.file.endswith(".md")
        if words and words[0].strip("`*:,.") in FIRST_WORDS and not is_page:
            faults.append(f"{where}: begins with {words[0]!r}: name the subject")
        plain = _NOT_PROSE.sub(lambda match: match[1] or "name", text.text)
        for sentence in _sentences(plain):
            count = len(re.findall(r"[A-Za-z][\w'-]*", sentence))
            if count > MOST_WORDS:
                faults.append(
                    f"{where}: {count} words in one sentence, at most {MOST_WORDS}: {sentence.strip()[:60]}..."
                )
        for pattern, term, place in WORDS:
            if text.file.startswith(place) and (found := re.search(pattern, plain)):
                faults.append(f"{where}: {found[0]!r}: write {term!r}")
        if not is_page:
            faults += [
                f"{where}: {path} does not exist" for path in _PATH.findall(text.text) if not (root / path).exists()
            ]
            faults += [
                f"{where}: {owner}::{member} does not exist"
                for owner, member in _MEMBER.findall(text.text)
                if owner in names and member not in names
            ]
    return faults


def _names(root: Path) -> set[str]:
    """Identifiers of csrc outside of comments."""
    found: set[str] = set()
    for file in (root / "csrc").rglob("*"):
        if file.suffix in CODE:
            found.update(re.findall(r"[A-Za-z_]\w*", re.sub(r"//[^\n]*", "", file.read_text(encoding="utf-8"))))
    return found


def _texts(root: Path) -> Iterator[Text]:
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            name = file.relative_to(root).as_posix()
            if file.suffix in CODE and name not in EXEMPT and "/." not in name and "results" not in name:
                source = file.read_text(encoding="utf-8")
                yield from (_python_texts(name, source) if file.suffix in (".py", ".pyi") else _blocks(name, source))
    for file in sorted([*(root / "docs").rglob("*.md"), *root.glob("*.md")]):
        name = file.relative_to(root).as_posix()
        if name not in EXEMPT and name != "CHANGE_LOG.md":
            yield from _paragraphs(name, file.read_text(encoding="utf-8"))


def _blocks(name: str, source: str) -> Iterator[Text]:
    """Comments of C++: whole lines that follow each other are one, a comment behind code is one by itself."""
    lines, begin = [], 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        code, found, comment = line.partition("//")
        if found and not code.strip():
            begin = begin if lines else number
            lines.append(comment.strip())
            continue
        if lines:
            yield Text(name, begin, "\n".join(lines))
            lines = []
        if found and '"' not in code:
            yield Text(name, number, comment.strip())


def _python_texts(name: str, source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for child in node.body:  # docstrings of attributes too
                value = child.value if isinstance(child, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield Text(name, child.lineno, inspect.cleandoc(value.value))
    last, lines, begin = -1, [], 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("#!", "# fmt", "# noqa", "# type")):
            continue
        own_line = not token.line[: token.start[1]].strip()
        if lines and not (own_line and token.start[0] == last + 1):
            yield Text(name, begin, "\n".join(lines))
            lines = []
        begin = begin if lines else token.start[0]
        lines.append(token.string.lstrip("#").strip())
        last = token.start[0] if own_line else -1
    if lines:
        yield Text(name, begin, "\n".join(lines))


def _paragraphs(name: str, source: str) -> Iterator[Text]:
    """Paragraphs of a page, without code blocks, tables and titles."""
    lines, begin, fenced = [], 0, False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        is_prose = line.strip() and not fenced and not line.lstrip().startswith(("```", "|", "#", ":", "<"))
        starts = bool(re.match(r"\s*([*-]|\d+\.)\s", line))
        if lines and (not is_prose or starts):
            yield Text(name, begin, "\n".join(lines))
            lines = []
        if is_prose:
            begin = begin if lines else number
            lines.append(line.strip())


def _sentences(text: str) -> list[str]:
    """Sentences; a list's item, a blank line, a line with an indented example and a colon end one."""
    pieces = re.split(r"\n[^\n]*\S {3,}\S[^\n]*|\n\s*\n|\n\s*(?:[*-]|\d+\.)\s|\n {2,}|::?\s|;\s", text)
    return [sentence for piece in pieces for sentence in re.split(r"(?<=[.!?])\)?\s+", piece)]


def main() -> int:
    """Prints violations; returns the exit status."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    faults = check(root)
    print("\n".join(faults) if faults else "language: all rules hold")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

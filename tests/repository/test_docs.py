"""The documentation works: code runs and prints the page's output, commands exist, links lead somewhere.

The Python blocks of a page are one script. A block that cannot run here has a comment ``<!-- not run: reason -->``
before it and is listed here.
"""

import ast
import contextlib
import io
import json
import re
import runpy
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.pages import DOCS, ROOT, Page, all_pages, run_page, shows

PAGES = all_pages()
WITH_PYTHON = [page for page in PAGES if page.script() and page.name != "README.md"]  # test_readme.py runs README's

NOT_RUN: dict[str, int] = {}

MARKDOWN = sorted(path for folder in ("", "docs/**/", "benchmark/**/") for path in ROOT.glob(f"{folder}*.md"))


def by_name(page):
    return page.name


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=by_name)
def test_python_blocks_run_and_print_what_the_page_says(page, tmp_path):
    done = run_page(page, tmp_path)
    assert done.returncode == 0, done.stderr
    for block in page.blocks("output"):
        assert block.not_run or shows(done.stdout, block.text), f"{page.name}:{block.line}\n{done.stdout}"


def test_what_is_not_run_is_listed_with_a_reason():
    found = Counter(page.name for page in PAGES for block in page.blocks() if block.not_run is not None)
    assert found == NOT_RUN


def test_output_of_a_page_is_compared_line_by_line():
    printed = "step 0 loss 6.213\nstep 1 loss 6.1\nstep 2 loss 6.0\ndone\n"
    assert shows(printed, "step 0 loss 6.2…\n…\nstep 2 loss 6…\ndone\n")
    assert shows(printed, "step … 6.1\n")
    for other in ("step 0 loss 6.2\n", "tep 1 loss 6.1\n", "step 0…\nstep 2…\n", "done\n…\nstep 0…\n"):
        assert not shows(printed, other), other


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_json_and_python_blocks_parse(page):
    for block in page.blocks("json"):
        json.loads(block.text)
    for block in page.blocks("python"):
        ast.parse(block.text)


def commands():
    """(page, words) of each command line in blocks of shells, continuation lines joined, comments dropped."""
    for page in PAGES:
        for block in page.blocks("", "bash", "sh", "console"):
            for line in block.text.replace("\\\n", " ").splitlines():
                with contextlib.suppress(ValueError):  # a picture of a file, not a command
                    yield page.name, shlex.split(line, comments=True)


def help_of(module, arguments):
    printed, argv = io.StringIO(), sys.argv
    sys.argv = [module, *arguments, "--help"]
    try:
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as stop:
            runpy.run_module(module, run_name="__main__")
    finally:
        sys.argv = argv
    assert stop.value.code == 0
    return printed.getvalue()


OF_COMMANDS = {"checkpoint", "config", "ones"}  # whose first word is one of their own subcommands


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_commands_take_the_flags_that_pages_show():
    helps, found = {}, set()
    for page, words in commands():
        if words[:1] == ["patrickstar"]:
            module, arguments, room = "patrickstar", words[1:], (words[1:2] or [""])[0]
        elif "-m" in words[:4] and words[words.index("-m") + 1].startswith("patrickstar"):
            module, *arguments = words[words.index("-m") + 1 :]
            room = module.removeprefix("patrickstar.")
        else:
            continue
        ends = (i for i, word in enumerate(arguments) if word == "torchrun" or word.endswith(".py"))
        own = arguments[: next(ends, None)]
        depth = (module == "patrickstar") + (room in OF_COMMANDS)
        subcommand = tuple(word for word in own[:depth] if word.isalpha())
        if (module, subcommand) not in helps:
            helps[module, subcommand] = help_of(module, subcommand)
        for flag in (word.partition("=")[0] for word in own if word.startswith("--")):
            assert re.search(rf"{flag}\b", helps[module, subcommand]), f"{page}: {module} {subcommand} has no {flag}"
        found.add(room)
    assert found >= {"plan", "run", "profile", "checkpoint", "env", "config", "bench"}


def test_example_scripts_take_the_flags_that_pages_show():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py"))
    flags = set(re.findall(r'"(--[a-z-]+)"', sources))
    scripts = [
        (page, words, index)
        for page, words in commands()
        for index, word in enumerate(words)
        if word.startswith("examples/") and word.endswith(".py")
    ]
    assert scripts
    for page, words, index in scripts:
        assert (ROOT / words[index]).is_file(), f"{page}: {words[index]}"
        for word in words[index + 1 :]:
            assert not word.startswith("--") or word in flags, f"{page}: {words[index]} has no {word}"


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_lead_somewhere(page):
    for link in page.links():
        if link.startswith(("https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), f"{page.name}: {link}"
        if anchor and path.suffix == ".md":
            assert anchor in Page(path).anchors(), f"{page.name}: {link}"


def test_all_pages_are_in_the_table_of_contents():
    index = Page(DOCS / "index.md")
    listed = set()
    for block in index.blocks("{toctree}"):
        for line in block.text.splitlines():
            if line.strip() and not line.startswith(":"):
                name = re.sub(r".*<(.*)>", r"\1", line.strip())
                found = list(DOCS.glob(f"{name}.md"))
                assert found, f"{index.name}: {line}"
                listed |= {path.relative_to(DOCS).as_posix() for path in found}
    there = {page.path.relative_to(DOCS).as_posix() for page in PAGES if page.path.is_relative_to(DOCS)}
    assert listed | {"index.md"} == there


def test_pages_show_all_pictures_that_are_drawn():
    source = (DOCS / "pictures.py").read_text(encoding="utf-8")
    drawn = set(re.findall(r'"(\w+)": draw_', source))
    blocks = [block for page in PAGES for block in page.blocks("{picture}")]
    shown = {re.search(r"^:file: (\w+)$", block.text, re.MULTILINE).group(1) for block in blocks}
    assert shown == drawn and len(drawn) >= 4
    assert all(re.search(r"^:alt: .{40,}$", block.text, re.MULTILINE) for block in blocks)


@pytest.mark.parametrize(("page", "least"), [("extending.md", 100), ("architecture.md", 80), ("tiny.md", 30)])
def test_paths_on_pages_for_contributors_exist(page, least):
    text = Page(DOCS / page).text
    paths = re.findall(r"`((?:csrc|patrickstar|tests|examples|tools)/[^`\s]*)`", text)
    assert len(set(paths)) > least
    assert [path for path in paths if not (ROOT / path).exists()] == []


def python_messages(path: Path) -> str:
    """All string literals of a module, one per line; ``…`` replaces formatted values."""
    texts = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            texts.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return "\n".join(texts)


def cpp_messages(path: Path) -> str:
    """All string literals of a C++ file, adjacent ones joined; ``…`` replaces the text between others."""
    text = path.read_text(encoding="utf-8")
    literals = list(re.finditer(r'"((?:[^"\\\n]|\\.)*)"', text))
    joined, end = [], 0
    for literal in literals:
        joined.append("" if text[end : literal.start()].isspace() else "…")
        joined.append(literal.group(1).replace('\\"', '"'))
        end = literal.end()
    return "".join(joined)


def test_quoted_error_messages_exist():
    messages = [python_messages(path) for path in (ROOT / "patrickstar").rglob("*.py")]
    messages += [python_messages(path) for path in [ROOT / "setup.py", *(ROOT / "build_backend").glob("*.py")]]
    messages += [cpp_messages(path) for kind in ("*.cpp", "*.h") for path in (ROOT / "csrc").rglob(kind)]
    text = Page(DOCS / "guides" / "troubleshooting.md").text
    fragments = re.findall(r"^### `(.+)`$", text, re.MULTILINE)
    assert len(fragments) > 20
    for fragment in fragments:
        pattern = "…[^\n]{0,80}?".join(re.escape(part.strip(" ")) + " ?" for part in fragment.split("…"))
        assert any(re.search(pattern, message) for message in messages), fragment


def prose_lines(text):
    code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith(("```", "~~~")):
            code = not code
        elif not code and not line.startswith(("    ", "|", "#")):
            yield number, line


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_of_prose_are_not_longer_than_120(page):
    lines = prose_lines(page.read_text(encoding="utf-8"))
    assert [number for number, line in lines if len(line) > 120] == []


def test_lines_of_the_core_are_not_longer_than_120():
    files = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    assert len(files) > 100
    lines = [(f, number) for f in files for number, line in enumerate(f.open(encoding="utf-8"), 1) if len(line) > 121]
    assert lines == []

"""The lint of comments, docstrings and pages."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_language  # noqa: E402


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("csrc/a.h", "// Of those that wait.\nint a;\n", "csrc/a.h:1: begins with 'Of'"),
        ("csrc/a.h", "int a;  // What it holds.\n", "csrc/a.h:1: begins with 'What'"),
        ("csrc/a.h", "// Moves the payload.\n", ""),
        ("csrc/engine/a.h", "// Moves the payload.\n", "'payload': write 'chunk buffer'"),
        ("csrc/a.h", "class Arena;\n// See Arena::missing.\n", "Arena::missing does not exist"),
        ("csrc/a.h", "// See csrc/b.h.\n", "csrc/b.h does not exist"),
        ("csrc/a.h", f"// {'word ' * 16}\n// {'word ' * 15}end.\n", "32 words in one sentence"),
        ("csrc/a.h", f"// {'word ' * 16}.\n// {'word ' * 15}end.\n", ""),
        ("csrc/a.h", f"// head\n//   one    {'word ' * 20}\n//   two    {'word ' * 20}\n", ""),
        ("patrickstar/a.py", 'def f():\n    """Whether it holds."""\n', "patrickstar/a.py:2: begins with 'Whether'"),
        ("patrickstar/a.py", 'class A:\n    b: int\n    """Of all ranks."""\n', "patrickstar/a.py:3: begins with 'Of'"),
        ("patrickstar/a.py", "a = 1  # as it was\n# It counts.\n", "patrickstar/a.py:2: begins with 'It'"),
        ("docs/a.md", f"# Of a title\n\n{'word ' * 40}.\n", "docs/a.md:3: 40 words"),
        ("docs/a.md", f"```\n{'word ' * 40}\n```\n| {'word ' * 40} |\n", ""),
    ],
)
def test_a_rule(tmp_path, file, text, complaint):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    found = check_language.check(tmp_path)
    assert [complaint in line for line in found] == ([True] if complaint else []), found

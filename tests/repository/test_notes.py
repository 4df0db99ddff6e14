import collections
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("csrc", "patrickstar", "docs", "tests", "benchmark", "examples", "tools", "build_backend")
SUFFIXES = {".h", ".inl", ".cpp", ".cu", ".py", ".md"}

_NOTE = re.compile(r"\[Note: ([a-zA-Z][^\]]*)\]")
_NEW_LINE = re.compile(r"\s*\n\s*(//|#|\*)?\s*")


def test_each_note_is_cited():
    places = collections.Counter()
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    for path in [*files, *ROOT.glob("*.md")]:
        places.update(_NOTE.findall(_NEW_LINE.sub(" ", path.read_text(encoding="utf-8"))))
    print(f"{len(places)} notes, {sum(places.values())} places")
    assert 10 < len(places) <= 60
    assert sorted(name for name, count in places.items() if count == 1) == []

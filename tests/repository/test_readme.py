"""What the README shows works (its commands and links: tests/repository/test_docs.py)."""

import re

from tests.pages import ROOT, Page, run_page

README = Page(ROOT / "README.md")


def test_code_blocks_run_and_train(tmp_path):
    done = run_page(README, tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^\d+ (\d+\.\d+)", done.stdout, re.MULTILINE)]
    assert len(losses) == 8 and losses[-1] < losses[0]


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`make ([a-z-]+)", README.text)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

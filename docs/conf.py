"""How Sphinx builds these pages: `make docs`, into build/docs. Warnings are errors."""

import logging
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import figures

import patrickstar

project = "PatrickStar"
author = "The PatrickStar developers"
copyright = author
release = version = patrickstar.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "pictures"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"PatrickStar {release}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_search_scorer = str(Path(__file__).resolve().parent / "search_scorer.js")
exclude_patterns = ["_pictures"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"

logging.getLogger("patrickstar").setLevel(logging.WARNING)  # of the runs that pictures are drawn from

_WITH_UNIT = re.compile(r"(\d) (?=(?:s|ms|us|x|%|B|GB|GiB|MiB|KiB|GB/s|MB|TFLOPS|H200s?)\b|%)")


def fill_figures(app: Sphinx, page: str, text: list[str]) -> None:
    """Figures come from benchmark/results/latest.json."""
    text[0] = figures.fill(text[0], figures.read_latest())


def keep_units(app: Sphinx, tree: nodes.document) -> None:
    """A number in a table is not parted from its unit."""
    for entry in tree.findall(nodes.entry):
        for text in list(entry.findall(nodes.Text)):
            if not isinstance(text.parent, nodes.literal):
                text.parent.replace(text, nodes.Text(_WITH_UNIT.sub("\\1\N{NO-BREAK SPACE}", text)))


def show_examples(app: Sphinx, what: str, name: str, subject: object, options: object, lines: list[str]) -> None:
    """An indented block of a docstring, behind an empty line, is code."""
    shown: list[str] = []
    for line in lines:
        begins = line.startswith("    ") and shown[-1:] == [""]
        if begins and not next((before for before in reversed(shown) if before), "").startswith(" "):
            shown += ["::", ""]
        shown.append(line)
    lines[:] = shown


def setup(app: Sphinx) -> None:
    """Figures before a page is parsed, docstrings before napoleon, units once a page is read."""
    app.connect("source-read", fill_figures)
    app.connect("autodoc-process-docstring", show_examples, priority=400)
    app.connect("doctree-read", keep_units)

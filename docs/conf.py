"""How Sphinx builds these pages: `make docs`, into build/docs. Warnings are errors."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import patrickstar

project = "PatrickStar"
author = "The PatrickStar developers"
copyright = author
release = version = patrickstar.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"PatrickStar {release}"
html_show_sourcelink = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"

"""Writes the table of model families in docs/support.md, from the tests' lists.

    python tools/support_table.py

tests/repository/test_support_table.py fails when the page is old.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.integrations.zoo import ADAPTED, ZOO, vision_families  # noqa: E402
from tests.ranks.mixed_models import class_name  # noqa: E402
from tests.ranks.test_every_text_model import on_a_mesh_in_the_guide, refused_in_the_guide  # noqa: E402
from tests.text_models import text_models  # noqa: E402

PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- families: python tools/support_table.py -->\n", "<!-- end of families -->\n"
TEXT = {
    "Llama": "Llama 2 and 3",
    "Qwen2": "Qwen2.5",
    "Qwen3": "Qwen3",
    "Mistral": "Mistral",
    "Gemma2": "Gemma 2",
    "Phi3": "Phi-3, Phi-4",
    "Olmo2": "OLMo 2",
    "Glm4": "GLM-4",
    "GPT2": "GPT-2",
}
"""Dense decoders: a part of the classes in tests/text_models.py."""
CLASSES = {"GPT2": "GPT2LMHeadModel"}


def rows() -> Iterator[list[str]]:
    """Yields the cells of each family."""
    refused, on_a_mesh = refused_in_the_guide(), on_a_mesh_in_the_guide()
    texts, vision = set(text_models()), vision_families()
    for family, name in {**TEXT, **ZOO}.items():
        is_vision = family in vision
        kind = CLASSES.get(family, class_name(family))
        is_tried = family in ZOO
        sequences = "tested" if kind in texts and kind not in refused and not is_vision else "refused"
        yield [
            name,
            f"`{kind}`",
            "tested" if is_tried or kind in texts else "expected",
            *["tested" if family in ADAPTED else "expected"] * 2,
            sequences,
            "tested" if kind in on_a_mesh else "refused",
        ]


def table() -> str:
    """Returns the table in Markdown."""
    head = ["family", "class", "full", "LoRA", "QLoRA", "sequences", "matrices"]
    lines = [head, ["---"] * len(head), *rows()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def page() -> str:
    """Returns docs/support.md with the table of now."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

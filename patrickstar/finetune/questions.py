"""Questions about Python's modules math and itertools, with answers from their docstrings.

Every function is asked about in several ways. Of some functions one of the questions is held out: to answer it the
model must have learned what is asked about, not how.
"""

from __future__ import annotations

import importlib
import inspect
import random
import re
from collections.abc import Iterator
from typing import Any

from patrickstar.finetune.conversations import Conversation, question

HELD_OUT_SHARE = 0.25
"""Share of functions of which one question is held out."""

_MODULES = ("math", "itertools")
_QUESTIONS = (
    "What does {} do?",
    "What is {} for?",
    "Explain {}.",
    "Describe {}.",
    "Tell me about {}.",
    "How would you explain {}?",
)
_SIGNATURE = re.compile(r"^[\w.]+\(.*?\)(\s*->\s*\S+)?(\s|$)")
_SENTENCE = re.compile(r"(.{12,110}?\.)\s")


def python_questions(seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """Conversations to learn from, and those that are held out."""
    chance = random.Random(seed)
    train, held_out = [], []
    for name, answer in sorted(_answers().items()):
        asked = [question(form.format(f"`{name}`"), answer, origin=name) for form in _QUESTIONS]
        if chance.random() < HELD_OUT_SHARE:
            held_out.append(asked.pop(chance.randrange(len(asked))))
        train += asked
    chance.shuffle(held_out)
    return train, held_out


def _answers() -> dict[str, str]:
    """The first sentence of the docstring of each function, by its name."""
    found = {}
    for name, value in _functions():
        text = inspect.getdoc(value) or ""
        for paragraph in text.split("\n\n"):
            words = _SIGNATURE.sub("", " ".join(paragraph.split()))
            sentence = _SENTENCE.match(f"{words} ")
            if sentence and words.isascii():
                found[name] = sentence[1]
                break
    return found


def _functions() -> Iterator[tuple[str, Any]]:
    """Public functions and classes, with the names that one writes."""
    for module_name in _MODULES:
        for name, value in sorted(vars(importlib.import_module(module_name)).items()):
            if not name.startswith("_") and callable(value):
                yield f"{module_name}.{name}", value

"""Questions about Python's standard library, with answers from its docstrings.

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

_MODULES = ("builtins", "math", "os.path", "random", "itertools", "shutil", "time")
_SKIPPED = ("bytes", "bytearray", "memoryview", "random.Random", "random.SystemRandom")  # others have their methods
_QUESTIONS = ("What does {} do?", "What is {} for?", "Explain {}.")
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
    """Public functions, classes and their methods, with the names that one writes."""
    for module_name in _MODULES:
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or not callable(value) or _is_imported(value, module):
                continue
            if inspect.isclass(value) and issubclass(value, BaseException):
                continue
            yield prefix + name, value
            if inspect.isclass(value) and prefix + name not in _SKIPPED:
                for method, function in sorted(vars(value).items()):
                    if not method.startswith("_") and callable(function):
                        yield f"{prefix}{name}.{method}", function


def _is_imported(value: Any, module: Any) -> bool:
    """True if ``module`` imports ``value`` from an unrelated module."""
    home = getattr(value, "__module__", None)
    return home not in (None, module.__name__, "posixpath", "ntpath", "genericpath", f"_{module.__name__}")

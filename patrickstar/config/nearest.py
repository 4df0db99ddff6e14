"""Spelling suggestions: the known name that is most similar to a given word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def likeness(word: str, name: str) -> float:
    """Case-insensitive similarity of two words: from 0 (nothing in common) to 1 (equal)."""
    return difflib.SequenceMatcher(None, word.lower(), name.lower()).ratio()


def nearest(word: str, known: Iterable[str]) -> str:
    """The known name that is most similar to ``word``, however little that is."""
    return max(known, key=lambda name: likeness(word, name))


def slip_of(word: str, known: Iterable[str], least_likeness: float) -> str | None:
    """The known name of which ``word`` is a misspelling; None if none is similar enough. Case-sensitive."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=least_likeness)), None)

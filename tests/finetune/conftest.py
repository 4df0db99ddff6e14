import logging
import os
from pathlib import Path

import pytest

from tests.finetune.tiny import TURNS, make_folder, write_lines


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Undoes what a command does to its process."""
    logger = logging.getLogger("patrickstar")
    level = logger.level
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    logger.setLevel(level)


@pytest.fixture(scope="package")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    return lambda kind: made / kind if (made / kind).exists() else make_folder(made / kind, kind)


@pytest.fixture
def chat(tmp_path) -> Path:
    lines = [{"prompt": f"What is {n}?", "answer": f"One more than {n - 1}. " * (n % 3 + 1)} for n in range(1, 6)]
    lines += [{"messages": TURNS}]
    lines += [{"conversations": [{"from": "human", "value": "Go on?"}, {"from": "gpt", "value": "Yes."}]}]
    return write_lines(tmp_path / "chat.jsonl", lines)

"""Shared fixtures: one open engine at a time, quiet libraries, reproducible threads."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _collect_engines():
    """A test that ends by an exception drops its engine; its memory must not count in the next one."""
    yield
    gc.collect()

"""Shared fixtures: one open engine at a time, quiet libraries, reproducible threads.

Without ``-m gpu`` the tests use the simulated device, on a machine with a GPU too.
"""

import gc
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
if "gpu" not in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _collect_engines():
    """A test that ends by an exception drops its engine; its memory must not count in the next one."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

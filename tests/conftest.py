"""Fixtures for all tests. Without ``-m gpu`` tests use the simulated device, also on a machine with a GPU."""

import gc
import itertools
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["PATRICKSTAR_PLAN_CACHE"] = "0"  # do not touch the user's cache
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic algorithms
if "PYTEST_XDIST_WORKER" not in os.environ and not any(
    option == "-m" and "gpu" in marker.replace("not gpu", "") for option, marker in itertools.pairwise(sys.argv)
):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # workers of pytest-xdist inherit it

import pytest
import torch

from patrickstar.session.registry import drop_unreachable_sessions

torch.set_num_threads(1)  # small models gain nothing from more, and other tests run beside


@pytest.fixture(autouse=True, scope="module")
def _set_libraries_aside():
    """Freezes the objects of PyTorch, transformers and other libraries: a collection would visit them for a quarter of
    a second. What is frozen stays so, for the same reason.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _collect_engines():
    """A test that ends by an exception drops its engine, whose memory must not count in the next test."""
    yield
    drop_unreachable_sessions()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)

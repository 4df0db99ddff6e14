"""Shared fixtures of the tests on a GPU."""

import contextlib
import gc

import pytest
import torch


@contextlib.contextmanager
def deterministic_algorithms():
    """Attention and embedding backward are only deterministic when asked to be. What tests before have left on the GPU
    is gone.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _two_threads():
    """Models are larger here, and references are computed on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


MOST_LEFT_BYTES = 32 * 2**20


@pytest.fixture(autouse=True)
def _leaves_no_memory():
    """Memory that a test leaves on the GPU is taken from the budgets of all tests after it in its process. PyTorch
    keeps a workspace of cuBLAS for each stream that has computed, 32 MiB on Hopper, until it is asked to clear them.
    """
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    yield
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    left = torch.cuda.memory_allocated() - before
    assert left <= MOST_LEFT_BYTES, f"{left / 2**20:.0f} MiB of GPU memory are left"


@pytest.fixture
def deterministic():
    """For one test."""
    with deterministic_algorithms():
        yield

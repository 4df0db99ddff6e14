import contextlib
import gc

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextlib.contextmanager
def deterministic_algorithms():
    """Backward of attention and embedding is deterministic only on request."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


MOST_LEFT_BYTES = 64 * 2**20


def _allocated():
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.fixture(autouse=True)
def _leaves_no_memory():
    """Memory left on the GPU would shrink later tests' budgets. cuBLAS keeps a workspace for each stream, 32 MiB on
    Hopper, until PyTorch clears them. Compiled kernels may keep as much as the L2 cache has, 60 MiB.
    """
    before = _allocated()
    yield
    if _allocated() - before > MOST_LEFT_BYTES:
        torch.compiler.reset()
    left = _allocated() - before
    assert left <= MOST_LEFT_BYTES, f"{left / 2**20:.0f} MiB of GPU memory are left"


@pytest.fixture
def deterministic():
    with deterministic_algorithms():
        yield

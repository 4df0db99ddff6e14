"""Shared fixtures of the tests on a GPU."""

import pytest
import torch


@pytest.fixture
def deterministic():
    """Attention and embedding backward are only deterministic when asked to be."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.use_deterministic_algorithms(False)

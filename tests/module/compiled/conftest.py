"""Compiled code, and what is counted of it, is kept by the process: each test begins without."""

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()

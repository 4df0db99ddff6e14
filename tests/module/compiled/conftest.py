"""Compiled code is kept by the process: each test begins without."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()

"""Training that changes its number of ranks on GPUs: one for each process where there are two, else one for both."""

from __future__ import annotations

import pytest
import torch

from tests.elastic.test_resize import ON_HOST, check

pytestmark = pytest.mark.gpu
CASES = {"on devices": (None, "fp32"), "on devices, split": (None, "bf16"), "on hosts": (ON_HOST, "bf16")}


@pytest.mark.parametrize("name", CASES)
def test_one_two_and_one_rank(name, tmp_path):
    """Where each process has a GPU, what lies on devices goes from one to the other."""
    optimizer, precision = CASES[name]
    check([1, 1, 2, 2, 1, 1], tmp_path, precision, 1e-4 if precision == "fp32" else 0.1, optimizer=optimizer)
    assert torch.cuda.is_available()

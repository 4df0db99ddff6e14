"""The GPU's measured peak, by which log lines divide a run's rate."""

import pytest
import torch

from patrickstar.monitor.peak import peak_tflops

pytestmark = pytest.mark.gpu


def test_the_peak_is_measured_once_and_takes_no_random_numbers():
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.get_rng_state(device)
    halves, floats = (peak_tflops(device, dtype, 2**40) for dtype in (torch.bfloat16, torch.float32))
    assert 1 < floats < halves < 10_000
    assert peak_tflops(device, torch.bfloat16, 2**40) == halves
    assert peak_tflops(device, torch.bfloat16, 2**29) is None
    assert peak_tflops(torch.device("cpu"), torch.float32, 2**40) is None
    assert torch.equal(torch.cuda.get_rng_state(device), before)

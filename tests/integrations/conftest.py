"""The runs on two ranks, made once; one thread, since these models are so small that a second one only waits."""

import pytest
import torch

from tests.distributed import run_ranks


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """What each of two ranks returned of ``tests.integrations.two_ranks.run_all``."""
    from tests.integrations.two_ranks import run_all

    return run_ranks(2, run_all, tmp_path_factory.mktemp("two_ranks"), timeout_seconds=300)

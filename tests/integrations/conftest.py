"""The runs on two ranks, made once."""

import pytest

from tests.distributed import run_ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """What each of two ranks returned of ``tests.integrations.two_ranks.run_all``."""
    from tests.integrations.two_ranks import run_all

    return run_ranks(2, run_all, tmp_path_factory.mktemp("two_ranks"), timeout_seconds=300)

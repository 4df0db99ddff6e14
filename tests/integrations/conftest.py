import pytest

from tests.distributed import run_ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    from tests.integrations.two_ranks import run_all

    return run_ranks(2, run_all, tmp_path_factory.mktemp("two_ranks"), timeout_seconds=300)

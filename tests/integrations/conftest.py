import fcntl
import os
import pickle

import pytest

from tests.distributed import run_ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """Runs once for all workers of pytest-xdist: the first one leaves its results for the others."""
    from tests.integrations.two_ranks import run_all

    folder = tmp_path_factory.getbasetemp().parent
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tmp_path_factory.mktemp("two_ranks")
    with (folder / "two_ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = folder / "two_ranks.pickle"
        if not results.exists():
            run_folder = folder / "two_ranks"
            run_folder.mkdir()
            results.write_bytes(pickle.dumps(run_ranks(2, run_all, run_folder, timeout_seconds=300)))
        return pickle.loads(results.read_bytes())

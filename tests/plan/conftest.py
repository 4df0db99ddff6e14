from unittest import mock

import pytest

from patrickstar.planning.planner import Planner


@pytest.fixture(autouse=True, scope="package")
def _shared_traces():
    """A trace takes about a second, and many commands ask about the same model."""
    traces, init = {}, Planner.__init__

    def share(planner):
        init(planner)
        planner._traces = traces

    with mock.patch.object(Planner, "__init__", share):
        yield

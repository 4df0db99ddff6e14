import os
from unittest import mock

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_resting_tier(tmp_path_factory):
    with mock.patch.dict(os.environ, HOME=str(tmp_path_factory.mktemp("resting_tier"))):
        yield


@pytest.fixture(autouse=True)
def _own_environment():
    with mock.patch.dict(os.environ):
        yield

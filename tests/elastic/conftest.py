"""Variables that a resize sets end with the test, and secrets of runs are in a folder of the tests'."""

import os
from unittest import mock

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_home(tmp_path_factory):
    """Where a run's secret is by default; the user's home is left alone."""
    with mock.patch.dict(os.environ, HOME=str(tmp_path_factory.mktemp("home"))):
        yield


@pytest.fixture(autouse=True)
def _own_environment():
    """Which rank this process is: libraries that other tests call would read it."""
    with mock.patch.dict(os.environ):
        yield

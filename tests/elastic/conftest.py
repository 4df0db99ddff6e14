"""What a resize says in the environment ends with the test."""

import os
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _own_environment():
    """Which rank this process is: libraries that other tests call would read it."""
    with mock.patch.dict(os.environ):
        yield

import signal

import pytest


@pytest.fixture
def interruptible():
    """A shell's background jobs ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

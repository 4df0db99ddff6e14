"""What fails on a worker is kept in the event of that task: it ends no process, and no other task."""

from __future__ import annotations

import threading

import pytest

from patrickstar import _C


def test_whoever_waits_for_a_task_that_failed_gets_the_failure():
    queue = _C.WorkQueue()
    before, failing, after = queue.submit(), queue.submit("no memory"), queue.submit()
    after.wait()
    before.wait()
    assert failing.is_over
    for _ in range(2):
        with pytest.raises(_C.SystemError, match="no memory"):
            failing.wait()
    failing.settle()


def test_the_failure_reaches_any_thread():
    event = _C.WorkQueue().submit("no memory")  # the queue ends before anybody waits
    found = []

    def wait():
        try:
            event.wait()
        except _C.SystemError as error:
            found.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == ["no memory"] * 4

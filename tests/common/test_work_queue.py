import threading
import time

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


def run(tasks, gates=()):
    queue = _C.WorkQueue()
    begin = _C.HostEvent()
    queue.submit(name="begin", after=begin)
    events = [queue.submit(name=name, rank=rank, after=after) for name, rank, after in tasks]
    begin.complete()
    for name, gate in gates:
        deadline = time.monotonic() + 60
        while name not in queue.names and time.monotonic() < deadline:
            time.sleep(0.001)
        gate.complete()
    for event in events:
        event.wait()
    return queue.names[1:]


def test_what_is_needed_first_runs_first():
    assert run([("c", 3, None), ("a", 1, None), ("b", 2, None), ("first of two", 2, None)]) == [
        "a", "b", "first of two", "c",
    ]  # fmt: skip


def test_others_are_neither_overtaken_nor_do_they_overtake():
    tasks = [("c", 3, None), ("b", 2, None), ("plain", None, None), ("a", 1, None), ("end", None, None)]
    assert run(tasks) == ["b", "c", "plain", "a", "end"]


def test_what_is_not_ready_waits_for_its_turn():
    gate = _C.HostEvent()
    assert run([("c", 3, None), ("a", 1, gate), ("b", 2, None)], [("c", gate)]) == ["b", "c", "a"]


def test_where_none_is_ready_the_oldest_runs():
    gates = [_C.HostEvent(), _C.HostEvent()]
    tasks = [("c", 3, gates[0]), ("a", 1, gates[1]), ("b", 2, gates[1])]
    assert run(tasks, [("begin", gates[0]), ("c", gates[1])]) == ["c", "a", "b"]

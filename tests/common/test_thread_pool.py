import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch

from patrickstar import _C
from tests.bits import assert_same_bits
from tests.optim.kernel_calls import adam_scalars, make_arrays, run_adam


def test_each_worker_is_pinned_and_the_caller_is_not():
    allowed = sorted(os.sched_getaffinity(0))
    before = sorted(os.sched_getaffinity(0))
    pool = _C.ThreadPool(len(allowed) + 1, list(reversed(allowed)))
    masks = worker_masks()
    assert masks == {f"ps-worker-{index + 1}": [cpu] for index, cpu in enumerate(reversed(allowed))}
    assert pool.pinned_cpus == list(reversed(allowed))
    assert sorted(os.sched_getaffinity(0)) == before
    del pool
    deadline = time.monotonic() + 10
    while worker_masks() and time.monotonic() < deadline:  # the kernel lists a thread a little longer than it is joined
        time.sleep(0.01)
    assert worker_masks() == {}


def test_workers_beyond_the_given_cpus_are_free():
    allowed = sorted(os.sched_getaffinity(0))
    pool = _C.ThreadPool(4, allowed[:1])
    assert worker_masks() == {"ps-worker-1": allowed[:1], "ps-worker-2": allowed, "ps-worker-3": allowed}
    assert (pool.num_threads, pool.pinned_cpus) == (4, allowed[:1])


@pytest.mark.parametrize("cpu", [-1, 5000])
def test_a_cpu_that_the_system_refuses_leaves_its_worker_free(cpu):
    allowed = sorted(os.sched_getaffinity(0))
    pool = _C.ThreadPool(3, [cpu, allowed[0]])
    assert worker_masks() == {"ps-worker-1": allowed, "ps-worker-2": allowed[:1]}
    assert pool.pinned_cpus == allowed[:1]


def test_host_work_gives_way_to_the_thread_that_launches_kernels():
    before = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    pool, usual_pool = _C.ThreadPool(3, [], _C.ThreadPriority.BELOW_LAUNCHES), _C.ThreadPool(2)
    added = {int(task.name) for task in Path("/proc/self/task").iterdir()} - before
    low = min(usual + 10, 19)
    deadline = time.monotonic() + 10
    while (found := sorted(os.getpriority(os.PRIO_PROCESS, thread) for thread in added)) != [usual, low, low]:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    assert os.getpriority(os.PRIO_PROCESS, 0) == usual
    assert pool.num_threads == usual_pool.num_threads + 1


def test_pinned_workers_compute_the_same():
    options = {"in_place": True, "seed": 0, "wild": False}
    expected, arrays = (make_arrays(300_001, torch.bfloat16, torch.bfloat16, **options) for _ in range(2))
    before = arrays.master.clone()
    pool = _C.ThreadPool(3, _C.allowed_cpus())
    for step in (1, 2):  # a pool is used again
        run_adam("scalar", expected, adam_scalars(step))
        run_adam(_C.optim.isa(), arrays, adam_scalars(step), pool)
    for name in ("master", "momentum", "variance", "grad"):
        assert_same_bits(getattr(arrays, name), getattr(expected, name), name)
    assert not torch.equal(arrays.master, before)


class Blocked:
    def __init__(self, pool, num_pieces, priority):
        self._arrived = threading.Semaphore(0)
        self._callers_gate, self._workers_gate = threading.Semaphore(0), threading.Semaphore(0)
        self.num_done = 0
        self._thread = threading.Thread(
            target=pool.parallel_for, args=(num_pieces, 1, self._wait, priority), daemon=True
        )
        self._thread.start()

    def _wait(self, _begin, _end):
        self._arrived.release()
        is_caller = threading.current_thread() is self._thread
        assert (self._callers_gate if is_caller else self._workers_gate).acquire(timeout=60)
        self.num_done += 1

    def await_threads(self, count):
        for _ in range(count):
            assert self._arrived.acquire(timeout=60)

    def let_go(self, count):
        self._callers_gate.release(count)
        self._workers_gate.release(count)

    def join(self):
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("priority", [_C.Priority.URGENT, _C.Priority.BACKGROUND])
def test_a_loop_waits_for_no_worker_that_is_busy_elsewhere(priority):
    pool = _C.ThreadPool(2)
    other = Blocked(pool, 2, priority)
    other.await_threads(2)  # its caller, and the only worker
    ranges = []
    pool.parallel_for(10, 3, lambda begin, end: ranges.append((begin, end)))
    assert ranges == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert other.num_done == 0
    other.let_go(1)
    other.join()


def test_a_worker_leaves_a_background_loop_for_an_urgent_one():
    pool = _C.ThreadPool(2)
    background = Blocked(pool, 50, _C.Priority.BACKGROUND)
    background.await_threads(2)
    together = threading.Barrier(2)
    urgent = threading.Thread(target=pool.parallel_for, args=(2, 1, lambda *_: together.wait(60)), daemon=True)
    urgent.start()  # its caller waits in the first piece until the worker is in the second
    while pool.num_urgent == 0:
        time.sleep(0.001)
    background.let_go(1)  # the piece of the worker and that of the caller, which goes on with the next
    urgent.join(60)
    assert not urgent.is_alive() and not together.broken
    background.await_threads(2)  # in their next pieces
    assert background.num_done == 2
    background.let_go(48)  # to each, whoever takes them
    background.join()


def test_what_a_piece_throws_is_rethrown_and_the_pool_goes_on():
    pool = _C.ThreadPool(2)
    done = []

    def fail(begin, _end):
        done.append(begin)
        raise ValueError(f"piece {begin}")

    with pytest.raises(_C.StateError, match="ValueError: piece"):
        pool.parallel_for(1000, 1, fail)
    assert len(done) <= 2  # the caller's first piece, perhaps the worker's: nobody takes the rest
    total = []
    pool.parallel_for(100, 1, lambda begin, end: total.append(end - begin))
    assert sum(total) == 100


def test_many_callers_at_once():
    pool = _C.ThreadPool(3)
    counts = [[0] * 1000 for _ in range(6)]

    def call(index):
        def count(begin, end):
            for i in range(begin, end):
                counts[index][i] += 1

        for _ in range(20):
            pool.parallel_for(1000, 7, count, _C.Priority.BACKGROUND if index % 2 else _C.Priority.URGENT)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [[20] * 1000] * 6


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


def worker_masks() -> dict[str, list[int]]:
    """{name of a pool's worker: the CPUs it may run on}, of all live pools; names must differ."""
    masks = {}
    for task in Path("/proc/self/task").iterdir():
        status = (task / "status").read_text()
        name = re.search(r"^Name:\t(.*)$", status, re.MULTILINE).group(1)
        if name.startswith("ps-worker-"):
            assert name not in masks, "two pools are alive"
            masks[name] = _C.parse_cpu_list(re.search(r"^Cpus_allowed_list:\t(.*)$", status, re.MULTILINE).group(1))
    return masks

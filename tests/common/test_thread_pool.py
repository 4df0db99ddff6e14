"""Workers run where they are told to, callers where they were."""

from __future__ import annotations

import os

import pytest
import torch

from patrickstar import _C
from tests.common.pool_threads import worker_masks
from tests.optim.kernel_calls import adam_scalars, assert_same_bits, make_arrays, run_adam


def test_each_worker_is_pinned_and_the_caller_is_not():
    allowed = sorted(os.sched_getaffinity(0))
    before = sorted(os.sched_getaffinity(0))
    pool = _C.ThreadPool(len(allowed) + 1, list(reversed(allowed)))
    masks = worker_masks()
    assert masks == {f"ps-worker-{index + 1}": [cpu] for index, cpu in enumerate(reversed(allowed))}
    assert pool.pinned_cpus == list(reversed(allowed))
    assert sorted(os.sched_getaffinity(0)) == before
    del pool
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

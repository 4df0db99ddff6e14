import gc
import os

import pytest

from patrickstar import _C
from patrickstar.config import HostAffinity, HostThreadsConfig
from patrickstar.machine.engine_options import host_thread_options
from tests.bits import assert_same_bits
from tests.common.test_thread_pool import worker_masks
from tests.models import MODELS
from tests.training import make_config, train

LAUNCHER = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("affinity", "with_gpu", "environment", "num_sharing", "expected"),
    [
        ("auto", True, {}, None, _C.Affinity.PINNED),
        ("auto", False, {}, None, _C.Affinity.FREE),
        ("pinned", False, {}, None, _C.Affinity.PINNED),
        ("free", True, {}, None, _C.Affinity.FREE),
        # Several processes without an assignment of CPUs.
        ("auto", True, {"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3"}, None, _C.Affinity.FREE),
        ("auto", True, {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None, _C.Affinity.PINNED),
        ("auto", True, {"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3"}, 8, _C.Affinity.PINNED),
        ("auto", True, {"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "3"}, 1, _C.Affinity.PINNED),
    ],
)
def test_affinity(monkeypatch, affinity, with_gpu, environment, num_sharing, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = HostThreadsConfig(affinity=HostAffinity(affinity), num_sharing_processes=num_sharing)
    options = host_thread_options(config, with_gpu=with_gpu)
    assert options.affinity == expected
    assert options.launching_core == (_C.LaunchingCore.RESERVED if with_gpu else _C.LaunchingCore.SHARED)
    assert options.num_sharing == (num_sharing or 1)


@pytest.mark.parametrize(("num_sharing", "index"), [(8, 6), (4, 2), (1, 0)])
def test_processes_that_share_cpus_are_told_apart_by_their_local_rank(monkeypatch, num_sharing, index):
    monkeypatch.setenv("LOCAL_RANK", "6")
    options = host_thread_options(HostThreadsConfig(num_sharing_processes=num_sharing), with_gpu=True)
    assert (options.sharing_index, options.num_sharing) == (index, num_sharing)


@pytest.mark.parametrize("rank", [None, "", "first", "-1"])
def test_sharing_needs_a_local_rank(monkeypatch, rank):
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(ValueError, match=r"num_sharing_processes is more than 1, but LOCAL_RANK is .*torchrun"):
        host_thread_options(HostThreadsConfig(num_sharing_processes=2), with_gpu=True)


def test_an_engines_threads_run_where_its_report_says():
    runs, seen = {}, {}
    for affinity in ("pinned", "free"):
        gc.collect()  # threads of the engine before

        def look(engine, step, affinity=affinity):
            seen[affinity] = worker_masks()

        threads = {"affinity": affinity, "num_threads": 3}
        config = make_config("bf16", default_chunk_size=2048, device_memory=10**6, host_threads=threads)
        runs[affinity] = train(MODELS["mlp"], config, steps=3, before_step=look)
    allowed = sorted(os.sched_getaffinity(0))
    pinned, free = runs["pinned"].report, runs["free"].report
    print(f"pinned to {pinned['host_thread_cpus']!r} of {_C.format_cpu_list(allowed)!r}")
    assert pinned["num_host_threads"] == free["num_host_threads"] == 3
    assert free["host_thread_cpus"] == ""
    assert list(seen["free"].values()) == [allowed, allowed]
    cpus = _C.parse_cpu_list(pinned["host_thread_cpus"])
    assert sorted(seen["pinned"].values()) == sorted([[cpu] for cpu in cpus] + [allowed] * (2 - len(cpus)))
    limited = _C.read_cpu_topology(allowed).quota_cpus < len(allowed)
    assert len(cpus) == (0 if limited else min(2, len(allowed)))
    assert pinned["host_interleaved_nodes"] == free["host_interleaved_nodes"]
    assert runs["pinned"].losses == runs["free"].losses
    assert_same_bits(runs["pinned"].state, runs["free"].state)


def test_by_default_there_is_a_thread_for_each_cpu():
    report = train(MODELS["mlp"], make_config("bf16"), steps=1).report
    assert report["num_host_threads"] == _C.num_available_cpus()
    assert report["host_thread_cpus"] == ""

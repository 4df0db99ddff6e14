import gc

import pytest

from patrickstar import _C
from patrickstar.config import HostThreadsConfig
from patrickstar.machine.engine_options import host_thread_options
from tests.common.test_thread_pool import worker_masks
from tests.gpu.test_equality import MIB, WIDE
from tests.training import assert_same, make_config, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


def test_threads_are_pinned_by_default(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    topology = _C.read_cpu_topology(_C.allowed_cpus())
    expected = _C.choose_host_threads(topology, host_thread_options(HostThreadsConfig(), with_gpu=True))
    masks = []
    config = make_config("bf16", default_chunk_size=4 * MIB, device_memory=400 * MIB)
    pinned = train(WIDE, config, steps=4, before_step=lambda engine, step: masks.append(worker_masks()))
    assert pinned.report["num_host_threads"] == expected.num_threads
    assert pinned.report["host_thread_cpus"] == _C.format_cpu_list(expected.worker_cpus)
    report = {name: value for name, value in pinned.report.items() if name.startswith("host_")}
    print(f"{report} of {_C.format_cpu_list(_C.allowed_cpus())}, quota {topology.quota_cpus}")
    allowed = _C.allowed_cpus()
    free = [allowed] * (expected.num_threads - 1 - len(expected.worker_cpus))
    assert sorted(masks[-1].values()) == sorted([[cpu] for cpu in expected.worker_cpus] + free)
    gc.collect()
    assert_same(train(WIDE, {**config, "host_threads": {"affinity": "free"}}, steps=4), pinned)

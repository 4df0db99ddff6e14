import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar import _C
from tests.common.cpu_trees import Machine, hyper_threaded, put


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8,10-11", [0, 1, 2, 3, 8, 10, 11]),
        ("5\n", [5]),
        ("", []),
        ("\n", []),
        ("7,3-4,4", [3, 4, 7]),
        ("1023-1025", [1023, 1024, 1025]),
        ("0,none", [0]),
        ("none", []),
        ("3-", []),
        ("-3", []),
        ("4-2,9", [9]),
    ],
)
def test_lists(text, cpus):
    assert _C.parse_cpu_list(text) == cpus


@given(st.sets(st.integers(0, 2000)))
def test_a_list_that_is_written_reads_as_it_was(cpus):
    text = _C.format_cpu_list(list(cpus))
    assert _C.parse_cpu_list(text) == sorted(cpus)
    ranges = sum(1 for cpu in cpus if cpu - 1 not in cpus)
    assert text.count(",") == max(ranges - 1, 0)  # the shortest there is


def test_one_node(tmp_path):
    topology = hyper_threaded(1, 4, 1).read(tmp_path)
    assert topology.cpus == [(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 3, 0)]
    assert topology.quota_cpus == math.inf


def test_two_nodes_with_hyper_threads(tmp_path):
    topology = hyper_threaded(2, 2, 2).read(tmp_path)
    assert topology.cpus == [(0, 0, 0), (1, 1, 0), (2, 2, 1), (3, 3, 1), (4, 0, 0), (5, 1, 0), (6, 2, 1), (7, 3, 1)]


def test_only_what_is_allowed_counts(tmp_path):
    topology = hyper_threaded(2, 2, 2).read(tmp_path, [7, 1, 4])
    assert topology.cpus == [(1, 1, 0), (4, 0, 0), (7, 3, 1)]


def test_odd_lists_of_nodes(tmp_path):
    machine = Machine([[(0,), (1,), (2,), (3,), (8,), (10,), (11,)], [], [(4,), (9,)]])
    machine.write(tmp_path)
    put(tmp_path / "sys/devices/system/node/node0/cpulist", "0-3,8,10-11")
    put(tmp_path / "sys/devices/system/node/online", "0-2")
    nodes = {cpu: node for cpu, _, node in _C.read_cpu_topology(machine.cpus, str(tmp_path)).cpus}
    assert nodes == {0: 0, 1: 0, 2: 0, 3: 0, 4: 2, 8: 0, 9: 2, 10: 0, 11: 0}


def test_a_machine_that_tells_nothing(tmp_path):
    topology = _C.read_cpu_topology([2, 5], str(tmp_path))
    assert topology.cpus == [(2, 2, 0), (5, 5, 0)]
    assert topology.quota_cpus == math.inf


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, math.inf),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "nonsense"}, math.inf),
        # Version 2, of a service within a limited slice.
        (
            {
                "proc/self/cgroup": "0::/slice/service",
                "sys/fs/cgroup/slice/cpu.max": "400000 100000",
                "sys/fs/cgroup/slice/service/cpu.max": "800000 100000",
            },
            4.0,
        ),
        # Version 1.
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, math.inf),
        (
            {
                "proc/self/cgroup": "5:memory:/other\n4:cpu,cpuacct:/docker/ab\n0::/",
                "sys/fs/cgroup/cpu/docker/ab/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu/docker/ab/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/other/cpu.cfs_quota_us": "1000",
                "sys/fs/cgroup/cpu/other/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        # A container: the path is the host's, the mount is the container's own.
        (
            {
                "proc/self/cgroup": "2:cpuset:/\n1:cpu:/kubepods/pod7",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000",
            },
            6.0,
        ),
        ({"proc/self/cgroup": "broken\n0::\n", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
    ],
)
def test_quotas(tmp_path, files, quota):
    for path, text in files.items():
        put(tmp_path / path, text)
    assert _C.read_cpu_topology([0], str(tmp_path)).quota_cpus == quota


def test_this_machine():
    cpus = sorted(os.sched_getaffinity(0))
    assert _C.allowed_cpus() == cpus
    topology = _C.read_cpu_topology(cpus)
    print(f"this machine: {topology.cpus}, quota {topology.quota_cpus}")
    assert [cpu for cpu, _, _ in topology.cpus] == cpus
    assert _C.num_available_cpus() == max(min(len(cpus), math.ceil(min(topology.quota_cpus, len(cpus)))), 1)

import collections
import math
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar import _C
from tests.common.cpu_trees import Machine, hyper_threaded, put


def choose(topology, **options):
    chosen = _C.HostThreadOptions()
    chosen.affinity = _C.Affinity.PINNED
    chosen.launching_core = _C.LaunchingCore.RESERVED
    for name, value in options.items():
        setattr(chosen, name, value)
    return _C.choose_host_threads(topology, chosen)


def test_one_node_leaves_the_first_core_to_the_launching_thread(tmp_path):
    threads = choose(hyper_threaded(1, 16, 1).read(tmp_path))
    assert threads.num_threads == 15
    assert threads.worker_cpus == list(range(1, 15))  # the caller, not pinned, has 0 and 15 to choose from
    assert threads.nodes == [0]


def test_physical_cores_come_first_and_the_launching_core_is_whole(tmp_path):
    topology = hyper_threaded(1, 4, 2).read(tmp_path)  # cores (0, 4), (1, 5), (2, 6), (3, 7)
    assert choose(topology).num_threads == 6
    assert choose(topology).worker_cpus == [1, 2, 3, 5, 6]
    assert choose(topology, num_threads=3).worker_cpus == [1, 2]
    assert choose(topology).priority is _C.ThreadPriority.BELOW_LAUNCHES
    shared = choose(topology, launching_core=_C.LaunchingCore.SHARED)
    assert (shared.worker_cpus, shared.priority) == ([0, 1, 2, 3, 4, 5, 6], _C.ThreadPriority.USUAL)


def test_any_number_of_threads_is_spread_over_nodes_in_proportion(tmp_path):
    machine = Machine([[(cpu,) for cpu in range(8)], [(cpu,) for cpu in range(8, 12)]])
    topology = machine.read(tmp_path)
    for num_threads in range(2, 13):
        threads = choose(topology, num_threads=num_threads, launching_core=_C.LaunchingCore.SHARED)
        near = sum(cpu < 8 for cpu in threads.worker_cpus)
        assert abs(near - (num_threads - 1) * 8 / 12) < 1, threads.worker_cpus
    assert choose(topology).nodes == [0, 1]


def test_odd_cpus(tmp_path):
    machine = Machine([[(0,), (1,), (2,), (3,), (8,), (10,), (11,)]])
    assert choose(machine.read(tmp_path)).worker_cpus == [1, 2, 3, 8, 10]


@pytest.mark.parametrize(
    ("cpus", "num_threads", "worker_cpus"), [([3], 1, []), ([2, 3], 1, []), ([2, 6], 1, []), ([1, 2, 3], 2, [2])]
)
def test_few_cpus(tmp_path, cpus, num_threads, worker_cpus):
    topology = hyper_threaded(1, 4, 2).read(tmp_path, cpus)  # 2 and 6 are one core
    threads = choose(topology)
    assert (threads.num_threads, threads.worker_cpus) == (num_threads, worker_cpus)


def test_more_threads_than_cpus_leave_some_free(tmp_path):
    threads = choose(hyper_threaded(1, 4, 1).read(tmp_path), num_threads=9)
    assert (threads.num_threads, threads.worker_cpus) == (9, [1, 2, 3])


def test_free_threads_are_as_many_and_nowhere(tmp_path):
    threads = choose(hyper_threaded(2, 4, 2).read(tmp_path), affinity=_C.Affinity.FREE)
    assert (threads.num_threads, threads.worker_cpus, threads.nodes) == (14, [], [0, 1])


@pytest.mark.parametrize(
    ("quota", "options", "num_threads"),
    [
        ("400000 100000", {}, 3),
        ("250000 100000", {}, 2),  # 2.5 CPUs: 3, one of them launches
        ("50000 100000", {}, 1),
        ("400000 100000", {"launching_core": _C.LaunchingCore.SHARED}, 4),
        ("800000 100000", {"num_sharing": 2}, 3),
        ("400000 100000", {"num_threads": 6}, 6),
    ],
)
def test_a_quota_limits_threads_and_pins_none(tmp_path, quota, options, num_threads):
    put(tmp_path / "sys/fs/cgroup/cpu.max", quota)
    threads = choose(hyper_threaded(2, 8, 1).read(tmp_path), **options)
    assert (threads.num_threads, threads.worker_cpus, threads.nodes) == (num_threads, [], [0, 1])


def test_a_quota_of_all_cpus_is_none(tmp_path):
    put(tmp_path / "sys/fs/cgroup/cpu.max", "400000 100000")
    assert choose(hyper_threaded(1, 4, 1).read(tmp_path)).worker_cpus == [1, 2]


def test_ranks_stay_on_their_node(tmp_path):
    topology = hyper_threaded(2, 8, 2).read(tmp_path)
    shares = [choose(topology, num_sharing=4, sharing_index=index) for index in range(4)]
    assert [share.nodes for share in shares] == [[0], [0], [1], [1]]
    assert shares[0].worker_cpus == [1, 2, 3, 17, 18]  # of the cores 0 to 3, the first launches
    assert [share.num_threads for share in shares] == [6, 6, 6, 6]


machines = st.builds(
    hyper_threaded, num_nodes=st.integers(1, 4), cores_per_node=st.integers(1, 9), threads_per_core=st.integers(1, 2)
)


@settings(max_examples=60, deadline=None)
@given(machines, st.integers(1, 8), st.data())
def test_shares_are_disjoint_and_complete(machine, num_sharing, data):
    allowed = data.draw(st.sets(st.sampled_from(machine.cpus), min_size=1))
    with tempfile.TemporaryDirectory() as root:
        topology = machine.read(Path(root), sorted(allowed))
    core_of = {cpu: core for cpu, core, _ in topology.cpus}
    node_of = {cpu: node for cpu, _, node in topology.cpus}
    shares = []
    for index in range(num_sharing):
        options = {"num_sharing": num_sharing, "sharing_index": index}
        # So many threads that each CPU of the share has one.
        share = choose(topology, num_threads=1000, launching_core=_C.LaunchingCore.SHARED, **options).worker_cpus
        shares.append(share)
        threads = choose(topology, **options)
        check_workers(threads, share, core_of)
        assert set(threads.nodes) == {node_of[cpu] for cpu in threads.worker_cpus or allowed}
    assert sorted(cpu for share in shares for cpu in share) == sorted(allowed)
    if len(set(core_of.values())) >= num_sharing:
        cores = [{core_of[cpu] for cpu in share} for share in shares]
        assert sum(map(len, cores)) == len(set().union(*cores)), "two processes share a core"
        sizes = [len(share) for share in cores]
        assert max(sizes) - min(sizes) <= 1


def check_workers(threads, share, core_of):
    workers = threads.worker_cpus
    assert threads.num_threads == len(workers) + 1
    assert set(workers) <= set(share)
    if len(share) > 1:
        assert len(share) - len(workers) >= 2
    if len({core_of[cpu] for cpu in share}) > 1:
        assert {core_of[cpu] for cpu in share} - {core_of[cpu] for cpu in workers}, "no core is left to launch"
    seen = collections.Counter()
    siblings = []
    for cpu in workers:
        siblings.append(seen[core_of[cpu]])
        seen[core_of[cpu]] += 1
    assert siblings == sorted(siblings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_threads": -1}, "num_threads is -1"),
        ({"num_sharing": 0}, "process 0 of 0"),
        ({"num_sharing": 2, "sharing_index": 2}, "process 2 of 2"),
        ({"sharing_index": -1}, "process -1 of 1"),
    ],
)
def test_errors(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        choose(hyper_threaded(1, 2, 1).read(tmp_path), **options)


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
        # Version 2: a service within a limited slice.
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

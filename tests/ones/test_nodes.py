"""Nodes of a Ray cluster with simulated GPUs leave and join while jobs train; processes are killed."""

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from patrickstar.ones.cluster.client import StartOptions, start
from patrickstar.ones.cluster.ray_fleet import NAMESPACE
from tests.distributed import ROOT
from tests.ones.elastic_script import GLOBAL_BATCH
from tests.ones.test_cluster import check, rows, samples_by_step, submit, until, until_alive, values_alone

NUM_KILLS = 20
SURVIVES = (("REDUNDANCY", "1"),)


@pytest.fixture
def nodes(tmp_path):
    """A cluster whose first node has two GPUs, and a scheduler on it."""
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "HOME": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ps-ray-", dir="/tmp") as folder:
        for name, value in variables.items():
            patch.setenv(name, value)
        for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        patch.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()
        first = {"num_cpus": 4, "num_gpus": 2, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=first)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            yield cluster, start(StartOptions(str(tmp_path / "ledger"), str(tmp_path / "logs"), interval_s=0.3))
        finally:
            ray.shutdown()
            cluster.shutdown()


def seen_once(folder, num_steps):
    seen = samples_by_step(folder)
    assert sorted(seen) == list(range(num_steps))
    assert all(len(samples) == len(set(samples)) == GLOBAL_BATCH for samples in seen.values())


@pytest.mark.slow
def test_a_job_goes_on_when_a_node_leaves_and_grows_when_one_joins(nodes, tmp_path):
    cluster, client = nodes
    alone = values_alone(tmp_path, 400)
    node = cluster.add_node(num_cpus=2, num_gpus=1)
    until(client, lambda _: client._ask("about").cluster.num_gpus == 3)
    submit(client, tmp_path / "job", 400, 0.3, SURVIVES, gpus=(3, 3))
    until(client, lambda found: found["job"].num_steps > 3)
    cluster.remove_node(node, allow_graceful=False)
    found = until(client, lambda found: found["job"].num_gpus == 2 and found["job"].state == "running")
    assert (found["job"].num_failures, found["job"].note) == (0, "goes on without 1 lost ranks")
    cluster.add_node(num_cpus=2, num_gpus=1)
    until(client, lambda found: found["job"].num_gpus == 3 and found["job"].state == "running")
    found = until(client, lambda found: found["job"].state in ("finished", "failed"))
    assert (found["job"].state, found["job"].num_failures) == ("finished", 0)
    check(tmp_path / "job", alone)
    seen_once(tmp_path / "job", 400)


def kill_one(kind, name, folder):
    """Kills a process of a job, or the scheduler; False if there is none now."""
    if kind == "rank":
        command = f"elastic_script.py\0{folder}\0".encode()
        found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if command in read(path)]
    else:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            actor = ray.get_actor("scheduler" if kind == "scheduler" else f"job:{name}", NAMESPACE)
            ask = workers_of if kind == "worker" else own_pid
            found = ray.get(actor.__ray_call__.remote(ask), timeout=60)
    for pid in found[-1:]:
        os.kill(pid, signal.SIGKILL)
    return bool(found)


def read(path):
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def own_pid(_):
    return [os.getpid()]


def workers_of(job):
    """Processes of the actors of a job's ranks."""
    actors = [actor for group in job._groups for actor in group.actors]
    return [ray.get(actor.__ray_call__.remote(own_pid), timeout=60)[0] for actor in actors]


def kill_after_a_step(client, kind, name, folder):
    steps = rows(client)[name].num_steps
    found = until(client, lambda found: found[name].num_steps > steps or found[name].state == "finished")
    is_killed = found[name].state != "finished" and kill_one(kind, name, folder)
    time.sleep(0.5)
    until_alive(client)
    return is_killed


@pytest.mark.slow
def test_jobs_end_whatever_is_killed(nodes, tmp_path):
    cluster, client = nodes
    cluster.add_node(num_cpus=2, num_gpus=2)
    until(client, lambda _: client._ask("about").cluster.num_gpus == 4)
    names, num_steps = ("one", "two"), 600
    alone = values_alone(tmp_path, num_steps)
    for name in names:
        submit(client, tmp_path / name, num_steps, 0.15, SURVIVES, gpus=(2, 3))
    until(client, lambda found: all(found[name].num_steps > 0 for name in names))
    kinds = ["rank", "worker", "rank", "scheduler", "rank", "worker", "job"]
    kills = []
    for number in range(NUM_KILLS):
        name, kind = names[number % len(names)], kinds[number % len(kinds)]
        if kill_after_a_step(client, kind, name, tmp_path / name):
            kills.append(kind)
    found = until(client, lambda found: all(found[name].state in ("finished", "failed") for name in names))
    print(kills, {name: (found[name].num_failures, found[name].num_resizes) for name in names})
    assert {name: found[name].state for name in names} == dict.fromkeys(names, "finished")
    for name in names:
        check(tmp_path / name, alone)
        seen_once(tmp_path / name, num_steps)

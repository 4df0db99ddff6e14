"""Nodes of a Ray cluster with simulated GPUs leave and join while jobs train; processes are killed."""

import contextlib
import itertools
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from patrickstar.elastic import BatchRange, LearningRateRule
from patrickstar.ones.cluster.client import StartOptions, start
from patrickstar.ones.cluster.ray_fleet import NAMESPACE
from patrickstar.ones.cluster.submission import Submission
from tests.distributed import ROOT
from tests.elastic import batch_runs, runs
from tests.ones import batch_script
from tests.ones.elastic_script import GLOBAL_BATCH
from tests.ones.seen import num_recoveries, steps_of
from tests.ones.test_cluster import SCRIPT, check, samples_by_step, submit, until, values_alone

KINDS = ("rank", "worker", "scheduler", "rank", "job")
"""Processes that are killed in turn: of a rank, of its actor, of the scheduler's and of the job's actor."""
NUM_KILLS, LEAVES_AFTER, JOINS_AFTER = 25, 8, 16
NUM_JOBS, NUM_SAMPLES = 8, 6000
BATCHES = BatchRange(min=6, base=12, max=48, rule=LearningRateRule.SQUARE_ROOT, warmup_steps=5)
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


@pytest.mark.slow
def test_a_job_runs_on_nodes_with_gpus_of_its_type(nodes, tmp_path):
    cluster, client = nodes
    cluster.add_node(num_cpus=2, num_gpus=2, resources={"accelerator_type:H100": 1})
    until(client, lambda _: client._ask("about").cluster.num_gpus == 4)
    for name, kind in (("bound", "H100"), ("one", ""), ("two", "")):
        (tmp_path / name).mkdir()
        arguments = (str(tmp_path / name), "100", "0.2")
        limits = (1, 2, 1, GLOBAL_BATCH, 120)
        client.submit(Submission(name, str(SCRIPT), arguments, str(tmp_path / name), (), *limits, gpu_type=kind))
    found = until(client, lambda found: all(row.num_steps > 0 for row in found.values()))
    assert found["bound"].gpu_type == "H100"
    for name, row in found.items():
        assert {type_of(node) for node in nodes_of(name)} == {row.gpu_type}
    until(client, lambda found: all(row.state == "finished" for row in found.values()))
    for name in found:
        seen_once(tmp_path / name, 100)


def nodes_of(name):
    """Nodes of a job's ranks."""
    actor = ray.get_actor(f"job:{name}", NAMESPACE)
    return ray.get(actor.__ray_call__.remote(lambda job: [node for group in job._groups for node in group.nodes]))


def type_of(node_id):
    (resources,) = [node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id]
    return "H100" if "accelerator_type:H100" in resources else ""


def processes_of(kind, name, folder):
    """Ids of a job's processes of a kind, or of the scheduler's."""
    if kind == "rank":
        words = f"\0{folder}\0".encode()
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if words in read(path)]
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        actor = ray.get_actor("scheduler" if kind == "scheduler" else f"job:{name}", NAMESPACE)
        ask = workers_of if kind == "worker" else own_pid
        return ray.get(actor.__ray_call__.remote(ask), timeout=60)
    return []


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


def submit_jobs(client, folder):
    for number in range(NUM_JOBS):
        name = f"job{number}"
        (folder / name).mkdir()
        arguments = (str(folder / name), str(NUM_SAMPLES), "0.1")
        least = 1 + number % 2
        limits = (least, least + 1, least, BATCHES.base, runs.NUM_SAMPLES)
        script = str(batch_script.__file__)
        client.submit(Submission(name, script, arguments, str(folder / name), (), *limits, batch_range=BATCHES))


def kill_one(client, kind, turn, folder, chance):
    """Kills a process, of one of the jobs in turn that has made a step since its last turn."""
    found = until(client, lambda found: any(may_be_killed(row, turn) for row in found.values()))
    row = min((row for row in found.values() if may_be_killed(row, turn)), key=lambda row: turn.get(row.name, (0, 0)))
    number = 1 + max((number for number, _ in turn.values()), default=0)
    pids = processes_of(kind, row.name, folder / row.name)
    if not pids:
        return None
    os.kill(chance.choice(pids), signal.SIGKILL)
    turn[row.name] = number, row.num_steps
    time.sleep(chance.random())
    return kind, row.name, row.num_steps, len(pids) if kind == "rank" else row.num_gpus


def may_be_killed(row, turn):
    return row.state in ("running", "changing") and row.num_steps > turn.get(row.name, (0, 0))[1]


def check_against_replay(folder):
    """Each sample was trained once, with the losses of plain PyTorch on one process. Returns what happened."""
    result = json.loads((folder / "result.json").read_text())
    plain = batch_runs.replay(dict(enumerate(result["batches"])), BATCHES, decay=1.0, lr=batch_script.LR)
    assert NUM_SAMPLES <= plain["num_samples"] < NUM_SAMPLES + BATCHES.max
    seen = steps_of(folder)
    for number, samples in plain["seen"].items():
        assert sorted(seen[number].samples) == sorted(samples), number
    expected = torch.tensor(list(plain["losses"].values()))
    losses = torch.tensor([sum(seen[number].losses) / len(seen[number].losses) for number in plain["losses"]])
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for name, value in plain["state"].items():
        torch.testing.assert_close(torch.tensor(result["values"][name]), value, rtol=1e-3, atol=1e-4)
    return result["batches"], plain["num_samples"], (losses - expected).abs().max().item(), losses[[0, -1]].tolist()


@pytest.mark.slow
def test_eight_jobs_end_whatever_is_killed(nodes, tmp_path):
    """Batches follow the noise scale; a node leaves and one joins meanwhile."""
    cluster, client = nodes
    chance, turn, kills = random.Random(7), {}, []
    node = cluster.add_node(num_cpus=4, num_gpus=4)
    until(client, lambda _: client._ask("about").cluster.num_gpus == 6)
    submit_jobs(client, tmp_path)
    for kind in itertools.cycle(KINDS):
        kill = kill_one(client, kind, turn, tmp_path, chance)
        if kill is None:
            continue
        kills.append(kill)
        print("killed", *kill)
        if len(kills) == LEAVES_AFTER:
            cluster.remove_node(node, allow_graceful=False)
            until(client, lambda _: client._ask("about").cluster.num_gpus == 2)
        if len(kills) == JOINS_AFTER:
            cluster.add_node(num_cpus=4, num_gpus=4)
            until(client, lambda _: client._ask("about").cluster.num_gpus == 6)
        if len(kills) == NUM_KILLS:
            break
    found = until(client, lambda found: all(row.state in ("finished", "failed") for row in found.values()))
    assert {row.state for row in found.values()} == {"finished"}
    for name, row in found.items():
        batches, num_samples, difference, (first, last) = check_against_replay(tmp_path / name)
        num_changes = sum(one != other for one, other in itertools.pairwise(batches))
        print(
            f"{name}: {num_samples} samples in {len(batches)} steps of {min(batches)} to {max(batches)}, "
            f"{num_changes} changes; {row.num_failures} restarts, {num_recoveries(tmp_path / name)} recoveries; "
            f"loss {first:.3g} to {last:.1e}, replay within {difference:.1e}"
        )

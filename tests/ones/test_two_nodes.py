"""A Ray cluster of two nodes in network namespaces, with simulated GPUs, and an elastic job on both."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray

from patrickstar.ones.cluster.client import StartOptions, start
from tests.distributed import ROOT, run_ranks
from tests.nodes import num_nodes, two_nodes
from tests.ones.test_cluster import check, submit, until, values_alone
from tests.ones.test_nodes import SURVIVES, nodes_of, seen_once

NUM_STEPS, PORT = 300, 6379
NOT_FOR_RAY = ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")
"""Variables with which Ray starts no simulated GPUs, or connects to another cluster."""


@contextlib.contextmanager
def raylet(node, folder, *arguments):
    """A raylet with two GPUs on a node, with processes of its own group, which are killed at the end."""
    words = ["--node-ip-address", node.address, "--num-cpus", "4", "--num-gpus", "2", "--temp-dir", folder, "--block"]
    words += ["--disable-usage-stats", "--object-store-memory", "100000000", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in NOT_FOR_RAY}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    command = [*node.prefix, sys.executable, "-m", "ray.scripts.scripts", "start", *words]
    output = Path(folder, "output")
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        while "Ray runtime started" not in output.read_text():
            assert process.poll() is None, output.read_text()
            time.sleep(0.1)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def drive(address, other, folder, node_folders):
    """Trains on both nodes, on the first one alone, whose raylet is at ``address``, and on both again."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    variables = (*SURVIVES, ("GLOO_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"]))
    found, places = [], []

    def runs_on(num_gpus):
        num_steps = found[-1].num_steps if found else 0

        def is_so(rows):
            row = rows["job"]
            return row.num_gpus == num_gpus and row.state == "running" and row.num_steps > num_steps + 3

        found.append(until(client, is_so)["job"])
        places.append(len({node["NodeID"] for node in ray.nodes() if node["Alive"]} & set(nodes_of("job"))))

    with raylet(other, node_folders[0], "--address", address):
        client = start(StartOptions(str(folder / "ledger"), str(folder / "logs"), interval_s=0.3))
        submit(client, folder / "job", NUM_STEPS, 0.2, variables, gpus=(4, 4))
        runs_on(4)
    runs_on(2)
    with raylet(other, node_folders[1], "--address", address):
        runs_on(4)
        found.append(until(client, lambda rows: rows["job"].state in ("finished", "failed"))["job"])
    ray.shutdown()
    return places, found


@pytest.mark.slow
def test_a_job_on_two_nodes_goes_on_without_one_and_grows_on_another(tmp_path):
    alone = values_alone(tmp_path, NUM_STEPS)
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(two_nodes())
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-ray-", dir="/tmp")) for _ in range(3)]
        stack.enter_context(raylet(nodes[0], folders[0], "--head", "--port", str(PORT), "--include-dashboard=false"))
        address = f"{nodes[0].address}:{PORT}"
        ((places, found),) = run_ranks(
            1, drive, address, nodes[1], tmp_path, folders[1:], nodes=nodes[:1], timeout_seconds=300
        )
    for row in found:
        print(row)
    assert num_nodes(nodes) == 2
    assert (places[0], places[2]) == (2, 2)  # Ray has not noticed yet that the node is gone when the job goes on
    assert [row.num_failures for row in found] == [0] * 4
    assert found[-1].state == "finished"
    check(tmp_path / "job", alone)
    seen_once(tmp_path / "job", NUM_STEPS)

"""Jobs share simulated GPUs on Ray: tiny models on the CPU, over gloo. The cluster has temporary folders and leaves the
user's cluster alone.
"""

import contextlib
import itertools
import json
import os
import signal
import stat
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import torch
from ray.util.placement_group import remove_placement_group

from patrickstar.command.ones import main
from patrickstar.ones.cluster.client import ClusterClient, ClusterError, StartOptions, start
from patrickstar.ones.cluster.ray_fleet import NAMESPACE
from patrickstar.ones.cluster.ray_placement import place_groups
from patrickstar.ones.cluster.submission import Submission
from tests.distributed import ROOT, run_python
from tests.ones import elastic_script, shared_script, trainer_script
from tests.ones.seen import steps_of

SCRIPT = Path(elastic_script.__file__)
TRAINER_SCRIPT = Path(trainer_script.__file__)
SHARED_SCRIPT = Path(shared_script.__file__)
SCHEDULER = "scheduler"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    root = tmp_path_factory.mktemp("cluster")
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "HOME": str(root)}
    unset = ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")  # Ray starts no simulated GPUs beside the first
    own = {"num_gpus": 4, "num_cpus": 4, "include_dashboard": False}
    own["_system_config"] = {"metrics_report_interval_ms": 500}
    # Ray's sockets have paths of at most 107 bytes.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ps-ray-", dir="/tmp") as folder:
        for name, value in variables.items():
            patch.setenv(name, value)
        for name in unset:
            patch.delenv(name, raising=False)
        ray.init(address="local", _temp_dir=folder, log_to_driver=False, logging_level="ERROR", **own)
        try:
            options = StartOptions(str(root / "ledger"), str(root / "logs"), interval_s=0.3)
            yield start(options), options
        finally:
            ray.shutdown()


def submit(
    client,
    folder,
    num_steps,
    step_seconds=0.05,
    environment=(),
    gpus=(1, 4),
    epoch_samples=120,
    script=SCRIPT,
    **options,
):
    folder.mkdir()
    arguments = (str(folder), str(num_steps), str(step_seconds))
    least, most = gpus
    limits = (least, most, least, elastic_script.GLOBAL_BATCH, epoch_samples)
    client.submit(Submission(folder.name, str(script), arguments, str(folder), environment, *limits, **options))


def rows(client):
    return {row.name: row for row in client.rows()}


def until(client, condition, seconds=600):  # a loaded machine takes several times what a free one does
    deadline = time.monotonic() + seconds
    while not condition(found := rows(client)):
        assert time.monotonic() < deadline, (found, client._ask("about").problem)
        time.sleep(0.1)
    return found


def check_parameters_in_state(name, model):
    def told(service):
        with service._lock:
            return service._scheduler._state(time.time(), service._scheduler._ledger.entries[name], "").job

    job = ray.get(ray.get_actor(SCHEDULER, NAMESPACE).__ray_call__.remote(told), timeout=60)
    assert job.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def pid_of(name):
    return ray.get(ray.get_actor(name, NAMESPACE).__ray_call__.remote(lambda actor: os.getpid()), timeout=60)


def values_alone(tmp_path, num_steps, script=SCRIPT):
    folder = tmp_path / f"alone-{num_steps}"
    folder.mkdir()
    done = run_python(script, folder, num_steps, 0, environment={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return result_of(folder)


def result_of(folder):
    result = json.loads((folder / "result.json").read_text())
    return result["num_steps"], {name: torch.tensor(value) for name, value in result["values"].items()}


def check(folder, alone):
    num_steps, values = result_of(folder)
    assert num_steps == alone[0]
    for name, value in alone[1].items():
        torch.testing.assert_close(values[name], value, rtol=1e-3, atol=1e-4)


def samples_by_step(folder):
    return {number: step.samples for number, step in steps_of(folder).items()}


def test_jobs_share_gpus_and_survive_a_worker_and_the_scheduler(cluster, tmp_path):
    client, _ = cluster
    alone = {num_steps: values_alone(tmp_path, num_steps) for num_steps in (30, 60)}
    submit(client, tmp_path / "long", 60, gpus=(1, 2))  # each rank is a process that imports PyTorch
    submit(client, tmp_path / "failing", 30, gpus=(1, 2), environment=(("FAIL_ONCE", "1"),))
    until(client, lambda found: found["long"].num_steps > 0)
    check_parameters_in_state("long", elastic_script.Regression().build())

    killed = pid_of(SCHEDULER)
    os.kill(killed, signal.SIGKILL)
    found = samples_by_step(tmp_path / "long").items()
    before = {step: samples for step, samples in found if len(samples) == elastic_script.GLOBAL_BATCH}
    assert rows(client).keys() == {"long", "failing"}
    assert pid_of(SCHEDULER) != killed
    found = until(client, lambda found: all(row.state in ("finished", "failed") for row in found.values()))

    assert {name: row.state for name, row in found.items()} == {"long": "finished", "failing": "finished"}
    assert found["failing"].num_failures == 1
    for name, num_steps in (("long", 60), ("failing", 30)):
        check(tmp_path / name, alone[num_steps])
    seen = samples_by_step(tmp_path / "long")
    assert before.items() <= seen.items()
    assert all(len(samples) == len(set(samples)) == elastic_script.GLOBAL_BATCH for samples in seen.values())
    assert sorted(seen) == list(range(60))


def test_a_scheduler_that_is_late_is_named(cluster, monkeypatch):
    client, _ = cluster

    def wait_in_vain(*_, **__):
        raise ray.exceptions.GetTimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(ray, "get", wait_in_vain)
        with pytest.raises(ClusterError, match="has not answered 'rows' for 120 s"):
            client.rows()


def test_status_answers_while_a_job_waits_to_be_submitted(cluster):
    client, _ = cluster
    actor = ray.get_actor(SCHEDULER, NAMESPACE)
    ray.get(actor.__ray_call__.remote(lambda service: service._lock.acquire()))  # as a tick does
    try:
        submitted = actor.submit.remote({})
        assert isinstance(client.rows(), list)
        assert ray.wait([submitted], timeout=0)[0] == []
    finally:
        ray.get(actor.__ray_call__.remote(lambda service: service._lock.release()))
    with pytest.raises(KeyError):
        ray.get(submitted)


def test_rays_metrics_endpoint_has_the_schedulers_figures(cluster):
    address = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    deadline, text = time.monotonic() + 120, ""
    while "patrickstar_ones_held_gpus{" not in text:
        assert time.monotonic() < deadline, text
        time.sleep(0.2)
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=60) as answer:
            text = answer.read().decode()
    lines = [line for line in text.splitlines() if "patrickstar_ones_gpus{" in line]
    assert {line.split()[-1] for line in lines} == {"4.0"}  # Ray may still have the figures of a killed scheduler


@pytest.mark.slow
def test_a_trainer_gets_the_gpus_of_a_job_that_has_ended(cluster, tmp_path):
    client, _ = cluster
    alone = values_alone(tmp_path, 160, TRAINER_SCRIPT)
    submit(client, tmp_path / "before", 60, gpus=(3, 3))
    until(client, lambda found: found["before"].num_gpus == 3)  # else the trainer may get all four first
    submit(client, tmp_path / "trainer", 160, 1.0, script=TRAINER_SCRIPT, epoch_samples=96)
    until(client, lambda found: found["trainer"].num_resizes > 0)
    (tmp_path / "trainer" / "hurry").touch()
    found = until(client, lambda found: found["trainer"].state in ("finished", "failed"))
    assert (found["trainer"].state, found["trainer"].num_failures) == ("finished", 0)
    check_parameters_in_state("trainer", trainer_script.gpt2())
    check(tmp_path / "trainer", alone)
    seen = samples_by_step(tmp_path / "trainer")
    assert sorted(seen) == list(range(160))
    assert all(len(samples) == len(set(samples)) == elastic_script.GLOBAL_BATCH for samples in seen.values())


@pytest.mark.slow
def test_a_job_gets_the_gpus_of_one_that_has_ended_and_can_be_cancelled(cluster, tmp_path):
    client, _ = cluster
    submit(client, tmp_path / "short", 40, gpus=(3, 3))
    submit(client, tmp_path / "growing", 10**6, 0.3, epoch_samples=10**6)
    found = until(client, lambda found: found["growing"].num_gpus > 1 and found["growing"].num_resizes > 0)
    assert 0 < found["growing"].resize_s < 60
    client.cancel("growing")
    assert rows(client)["growing"].state == "cancelled"
    with pytest.raises(ValueError, match="no job growing"):
        client.cancel("growing")
    submit(client, tmp_path / "broken", 60, environment=(("PYTHONPATH", "/nowhere"),))
    found = until(client, lambda found: found["broken"].state == "failed")
    assert "a rank ended with" in found["broken"].note
    until_free(4)


@contextlib.contextmanager
def holding(client, folder, num_gpus):
    """Context in which a job of a higher priority holds GPUs."""
    folder.mkdir()
    loop = "while not pathlib.Path('end').exists():\n    time.sleep(0.1)\n"
    (folder / "hold.py").write_text(f"import pathlib, time\n{loop}")
    limits = (num_gpus, num_gpus, num_gpus, num_gpus, 120)
    client.submit(Submission(folder.name, str(folder / "hold.py"), (), str(folder), (), *limits, priority=1))
    until(client, lambda found: found[folder.name].state == "running")
    yield
    (folder / "end").touch()
    until(client, lambda found: found[folder.name].state == "finished")


@pytest.mark.slow
def test_jobs_with_a_sequence_and_with_a_mesh_change_their_ranks_by_a_restart(cluster, tmp_path):
    client, _ = cluster
    num_steps = 80
    alone = values_alone(tmp_path, num_steps, SHARED_SCRIPT)
    sections = {"sequence": {"sequence_parallel": {"size": 2}}, "mesh": {"tensor_parallel": {"rows": 1, "columns": 2}}}

    def begin(name):
        options = {"gpus": (2, 4), "inner_group": 2, "script": SHARED_SCRIPT}
        environment = (("SHARED", json.dumps(sections[name])),)
        submit(client, tmp_path / name, num_steps, 0.2, environment, **options)

    def trains(name, num_gpus, after=0):
        def is_so(found):
            row = found[name]
            assert row.state not in ("finished", "failed"), row
            return row.state == "running" and row.num_gpus == num_gpus and row.num_steps > after + 3

        return until(client, is_so)[name].num_steps

    begin("sequence")
    done = trains("sequence", 4)
    with holding(client, tmp_path / "two", 2):
        trains("sequence", 2, done)
    begin("mesh")
    done = trains("mesh", 2)
    until(client, lambda found: found["sequence"].state in ("finished", "failed"))
    with holding(client, tmp_path / "four", 4):
        pass
    trains("mesh", 4, done)
    found = until(client, lambda found: found["mesh"].state in ("finished", "failed"))
    seen_alone = steps_of(tmp_path / f"alone-{num_steps}")
    for name, groups in (("sequence", [2, 1]), ("mesh", [1, 2])):
        assert (found[name].state, found[name].num_failures) == ("finished", 0)
        check_parameters_in_state(name, shared_script.LanguageModel().build())
        check(tmp_path / name, alone)
        seen = steps_of(tmp_path / name)
        assert sorted(seen) == list(range(num_steps))
        assert [number for number, _ in itertools.groupby(len(seen[step].losses) for step in sorted(seen))] == groups
        for number, step in seen_alone.items():
            assert sorted(seen[number].samples) == sorted(step.samples)
        losses, expected = (
            torch.tensor([statistics.fmean(steps[step].losses) for step in range(num_steps)])
            for steps in (seen, seen_alone)
        )
        print(f"{name}: losses within {(losses - expected).abs().max():.1e} of one process")
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def until_free(num_gpus):
    deadline = time.monotonic() + 300
    while ray.available_resources().get("GPU") != num_gpus:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_the_command_says(cluster, tmp_path, capsys, monkeypatch):
    client, options = cluster
    monkeypatch.chdir(tmp_path)
    rigid = tmp_path / "rigid.py"
    rigid.write_text("print('done')\n")
    gpus = ["--global-batch", "12", "--epoch-samples", "120"]
    assert main(["submit", "--name", "rigid", "--gpus", "1-4", *gpus, str(rigid)]) == 0
    assert "it can run on 1, 2, 3, 4 of them" in (out := capsys.readouterr().out)
    assert "has no ElasticRun" in out
    assert main(["submit", "--name", "big", "--gpus", "5-6", *gpus, str(rigid)]) == 2
    assert "job big needs at least 6 GPUs and the cluster has 4" in capsys.readouterr().err
    until(client, lambda found: found["rigid"].state == "finished")
    ranged = ["--gpus", "1-4", *gpus, "--batch-range"]
    assert main(["submit", "--name", "ranged", *ranged, "13-24", str(rigid)]) == 2
    assert "min 13, base 12 and max 24 samples" in capsys.readouterr().err
    assert main(["submit", "--name", "ranged", *ranged, "6-24", "--batch-rule", "linear", str(rigid)]) == 0
    until(client, lambda found: found["ranged"].state == "finished")
    assert main(["status", "--once"]) == 0
    assert "finished" in capsys.readouterr().out
    folder = Path(options.logs, "rigid")
    logs = list(folder.iterdir())
    assert {path.suffix for path in logs} == {".log"}  # the run's secret is gone
    assert (mode(folder), {mode(path) for path in (*logs, Path(options.ledger))}) == (0o700, {0o600})
    assert main(["cancel", "nobody"]) == 2
    assert "no job nobody that waits or runs" in capsys.readouterr().err
    with pytest.raises(ClusterError, match="runs on this cluster already"):
        start(options)
    monkeypatch.setattr("patrickstar.__version__", "0.0.1")
    with pytest.raises(ClusterError, match="install the same version here and on all nodes"):
        ClusterClient()


def command(*arguments, home):
    environment = {**os.environ, "HOME": str(home)}
    line = [sys.executable, "-m", "patrickstar", "ones", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_simulated_cluster_is_started_used_and_ended_beside_another_one(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    assert command("stop", home=tmp_path)[0] == 2
    try:
        assert command("start", "--simulated-gpus", "2", home=tmp_path) == (0, any_text("schedules 2 GPUs"))
        assert command("start", "--simulated-gpus", "2", home=tmp_path) == (2, any_text("runs here already"))
        script = tmp_path / "script.py"
        script.write_text("print('done')")
        job = ["--name", "job", "--gpus", "1-2", "--global-batch", "12", "--epoch-samples", "120", str(script)]
        assert command("submit", *job, home=tmp_path) == (0, any_text("it can run on 1, 2 of them"))
        assert command("status", "--once", home=tmp_path) == (0, any_text("job"))
    finally:
        note = json.loads((tmp_path / ".patrickstar/ones/cluster.json").read_text())
        assert command("stop", home=tmp_path) == (0, any_text("other clusters run on"))
    assert not Path(note["folder"]).exists()
    assert not Path(f"/proc/{note['pid']}").exists()
    assert ray.cluster_resources()["GPU"] == 4
    client, _ = cluster
    assert client.about.cluster.num_gpus == 4


@pytest.mark.slow
def test_a_start_that_fails_leaves_nothing_behind(cluster, tmp_path):
    before = set(Path("/tmp").glob("patrickstar-ray-*"))
    (tmp_path / "ledger.jsonl").write_text("no ledger\n")
    said = command("start", "--simulated-gpus", "1", "--folder", str(tmp_path), home=tmp_path)
    assert said == (2, any_text("is no line of a ledger"))
    assert not (tmp_path / ".patrickstar/ones/cluster.json").exists()
    assert set(Path("/tmp").glob("patrickstar-ray-*")) == before
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in commands if str(tmp_path).encode() in line]


def test_a_start_that_waits_for_gpus_holds_none(cluster):
    until_free(4)
    job = Submission("job", str(SCRIPT), (), "/", (), 1, 4, 1, 12, 120)
    first = place_groups(2, job, ())
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(place_groups, 3, job, ())
        others = place_groups(2, job, ())  # not stopped by three that wait for a third GPU
        for group in first:
            remove_placement_group(group)
        assert not waiting.done()
        remove_placement_group(others.pop())
        found = [*others, *waiting.result()]
    assert len(found) == 4
    for group in found:
        remove_placement_group(group)
    until_free(4)


class any_text:  # noqa: N801 (it is used as a function)
    def __init__(self, part):
        self.part = part

    def __eq__(self, other):
        return self.part in other

    def __repr__(self):
        return f"...{self.part}..."

"""The recipes of docs/guides/slurm.md, with stand-ins for srun and scontrol."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml

from patrickstar.engine.saved_run import EXIT_PREEMPTED
from tests.pages import DOCS, Page

GUIDE = Page(DOCS / "guides" / "slurm.md")
TRAINING = """
import os, pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit({status})
signal.signal(signal.SIGTERM, save)
pathlib.Path("starting").write_text(str(os.getpid()))
pathlib.Path("starting").rename("ready")
if os.environ.get("FAILS"):
    sys.exit(3)
time.sleep(float(os.environ.get("SECONDS_TO_TRAIN", 60)))
"""


STAND_INS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": 'echo "$@" >> scontrol.log',
}


def recipe(marker):
    """The bash block that contains ``marker``."""
    return next(block.text for block in GUIDE.blocks("bash") if marker in block.text)


def start(folder, script, status, **environment):
    """Starts a job script whose training ends with ``status`` when it is saved."""
    (folder / "train.py").write_text(TRAINING.format(status=status))
    (folder / "job").write_text(script)
    stand_ins = {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "scontrol": 'echo "$@" >> scontrol.log',
    }
    for name, body in stand_ins.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "head": "localhost"}
    environment |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    return subprocess.Popen(["bash", "job"], cwd=folder, env=os.environ | environment, start_new_session=True)


def end(job, folder, signals=()):
    """Sends signals to processes once training runs; returns the job's status and whether it was requeued."""
    deadline = time.monotonic() + 60
    while not (folder / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for send in signals:
        send()
    status = job.wait(60)
    log = folder / "scontrol.log"
    return status, log.exists() and log.read_text() == "requeue 17\n"


def with_torchrun(folder, **environment):
    script = recipe("--signal=B:USR1@120").replace("torchrun ... train.py", f"{sys.executable} train.py")
    assert "torchrun" not in script.replace("each torchrun", "")
    return start(folder, script, status=1, **environment)


def without_torchrun(folder, **environment):
    return start(
        folder, recipe("--signal=TERM@120").replace("exec python", f"exec {sys.executable}"), 75, **environment
    )


def test_a_signal_to_the_batch_script_saves_and_requeues(tmp_path):
    job = with_torchrun(tmp_path)
    assert end(job, tmp_path, [lambda: job.send_signal(signal.SIGUSR1)]) == (1, True)
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(("environment", "status"), [({"FAILS": "1"}, 3), ({"SECONDS_TO_TRAIN": "0"}, 0)])
@pytest.mark.parametrize("start_job", [with_torchrun, without_torchrun])
def test_a_run_that_ends_by_itself_is_not_requeued(start_job, environment, status, tmp_path):
    assert end(start_job(tmp_path, **environment), tmp_path) == (status, False)


def test_a_rank_that_is_saved_after_a_signal_is_requeued(tmp_path):
    job = without_torchrun(tmp_path)
    to_the_rank = lambda: os.kill(int((tmp_path / "ready").read_text()), signal.SIGTERM)  # noqa: E731
    assert end(job, tmp_path, [to_the_rank]) == (EXIT_PREEMPTED, True)
    assert (tmp_path / "saved").exists()


def test_the_kubernetes_job_ignores_the_status_of_a_saved_run():
    text = next(block.text for block in GUIDE.blocks("yaml"))
    job = yaml.safe_load(text)
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [EXIT_PREEMPTED] in [rule.get("onExitCodes", {}).get("values") for rule in rules]
    assert {rule["action"] for rule in rules} == {"Ignore"}
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy allows nothing else
    grace = int(re.search(r"grace_seconds=(\d+)", text)[1])
    assert grace <= pod["terminationGracePeriodSeconds"] - 10
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmark import launch
from benchmark.launch import Outcome, rank_environment
from benchmark.systems import Job
from benchmark.systems.run import run_system

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import json, os, signal, sys, time
rank, pipe = int(os.environ["RANK"]), os.fdopen(int(sys.argv[-1]), "w")
def send(kind, **values):
    print(json.dumps({"event": kind, **values}), file=pipe, flush=True)
def initialise(seconds=1.0):
    send("initialised", init_seconds=seconds, version="1", settings={"rank": rank})
def step(seconds, loss):
    send("step", seconds=seconds, loss=loss, grad_norm=loss)
def measure(device, host):
    send("measured", device_peak_bytes=device, host_peak_bytes=host, report={"rank": rank})
def fail(outcome, reason):
    send("failed", outcome=outcome, reason=reason)
    sys.exit(1)
print("this is rank", rank, flush=True)
"""


def job(ranks, **values):
    common = {"system": "fsdp2", "model": "tiny", "length": 64, "batch": 2, "clipping": 0.0, "speculation": "auto"}
    limits = {"gpu_bytes": None, "host_bytes": None, "warmup": 1, "steps": 2}
    return Job(ranks=ranks, **{**common, **limits, **values})


@pytest.fixture
def run(monkeypatch):
    started = []
    start = subprocess.Popen

    def record(*args, **kwargs):
        started.append(start(*args, **kwargs))
        return started[-1]

    def run_script(ranks, script, *, timeout_seconds=60, log=print, **values):
        monkeypatch.setattr(subprocess, "Popen", record)
        monkeypatch.setattr(launch, "worker_command", lambda module, job: [sys.executable, "-c", WORKER + script])
        return run_system(job(ranks, **values), timeout_seconds=timeout_seconds, log=log)

    yield run_script
    assert started and all(process.returncode is not None for process in started)


def test_one_run_of_several_ranks(run):
    result = run(
        3,
        """
if rank == 0:
    send("provenance", gpu="none")
initialise(1.0 + rank)
time.sleep(0.2 * (2 - rank))
for number in range(3):
    step(10.0 * number + rank, loss=number + rank / 2)
measure(device=100 - rank, host=1000 + rank)
if rank == 0:
    send("profiled", computing_seconds=5.0)
""",
    )
    assert result.outcome is Outcome.TRAINED and result.is_measured and not result.reason
    assert result.provenance == {"gpu": "none"}
    assert result.init_seconds == 3.0  # the slowest
    assert result.settings == result.report == {"rank": 0}
    assert result.step_seconds == [0.0, 10.0, 20.0]
    assert result.slowest_step_seconds == [2.0, 12.0, 22.0]
    assert result.losses == [0.5, 1.5, 2.5]  # means
    assert result.grad_norms == [0.0, 1.0, 2.0]  # rank 0's
    assert (result.device_peak_bytes, result.host_peak_bytes) == (100, 3003)
    assert result.activity == {"computing_seconds": 5.0}


def test_the_rank_at_fault_is_named_and_the_others_end(run):
    begin = time.monotonic()
    result = run(
        4,
        """
initialise()
step(1.0, 1.0)
if rank == 0:
    fail("failed", "RankFailure: rank 2 failed")
if rank == 1:
    time.sleep(0.1)
    fail("failed", "ValueError: later")
if rank == 2:
    time.sleep(0.2)
    fail("out of memory", "OutOfMemoryError: 64 GiB")
time.sleep(1000)
""",
    )
    assert time.monotonic() - begin < 30
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert result.reason == "rank 2: OutOfMemoryError: 64 GiB (in timed step 1)"
    assert result.log_tail == "this is rank 2\n"


@pytest.mark.parametrize(("ranks", "who"), [(1, ""), (2, "rank 1: ")])
def test_a_killed_worker(run, ranks, who):
    script = "if rank == int(os.environ['WORLD_SIZE']) - 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(1000)"
    result = run(ranks, "time.sleep(0.3)\n" + script)
    assert result.outcome is Outcome.KILLED
    assert result.reason.startswith(f"{who}SIGKILL") and result.reason.endswith("(in the initialisation)")
    assert result.host_peak_bytes > 1e6


def test_a_worker_that_ends_too_early(run):
    result = run(2, "initialise()")
    assert result.outcome is Outcome.FAILED and result.reason == "exit status 0 (in warm-up step 1)"


def test_ranks_that_hang(run):
    result = run(2, "time.sleep(1000)", timeout_seconds=0.5)
    assert result.outcome is Outcome.TIMED_OUT
    assert result.reason == "more than 0.5 s (in the initialisation)"
    assert result.log_tail == "rank 0:\nthis is rank 0\n\nrank 1:\nthis is rank 1\n"


def test_host_memory_is_that_of_all_ranks(run):
    script = "memory = bytearray(60_000_000)\ntime.sleep(1000)"
    result = run(2, script, host_bytes=100_000_000)
    assert result.outcome is Outcome.OUT_OF_MEMORY and "100000000 are allowed" in result.reason


def test_a_failed_profile_costs_no_figures(run):
    script = """
initialise()
for _ in range(3): step(1.0, 1.0)
measure(None, 1000)
"""
    first_says_so = 'if rank == 0: send("not_profiled", reason="ValueError: no")\nelse: time.sleep(1000)'
    result = run(2, script + first_says_so)
    assert result.is_measured and result.activity_reason == "ValueError: no"
    another_dies = "time.sleep(0.5)\nif rank == 1: fail('failed', 'ValueError: no')\ntime.sleep(1000)"
    result = run(2, script + another_dies)
    assert result.is_measured and result.activity_reason == "rank 1: ValueError: no (in the profiled step)"
    assert (result.device_peak_bytes, result.host_peak_bytes) == (None, 2000)


def test_what_ranks_are_told(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    told = rank_environment(2, 4, 1234)
    expected = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "1234"}
    assert expected.items() <= told.items()
    assert told["NCCL_NVLS_ENABLE"] == "0" and told["GLOO_SOCKET_IFNAME"] == "lo"
    assert 1 <= int(told["OMP_NUM_THREADS"]) <= max(1, os.cpu_count() // 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert rank_environment(2, 4, 1234)["OMP_NUM_THREADS"] == "7"


def test_a_worker_ends_with_its_parent():
    values = json.dumps(vars(job(1, system="patrickstar", steps=100_000)))
    command = [sys.executable, "-m", "benchmark.systems.worker", values, "1"]  # events to the standard output
    script = (
        "import subprocess, time\n"
        f"print(subprocess.Popen({command!r}, start_new_session=True).pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        worker = int(parent.stdout.readline())
        events = [json.loads(parent.stdout.readline())["event"] for _ in range(2)]
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 20
        while _is_alive(worker) and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = not _is_alive(worker)
        if not ended:
            os.kill(worker, signal.SIGKILL)
    assert events == ["provenance", "initialised"] and ended


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False

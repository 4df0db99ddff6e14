"""Runs a function on ranks that are processes: `run_ranks(2, function, argument)`.

Each rank has torchrun's environment, one thread, and torch's store on a free port. `function` must be importable from a
module's top level; `function`, arguments and results are pickled. Ranks are forked from a server that has imported
tests/rank_imports.py, which saves five seconds for each rank. With a GPU (CUDA does not survive forks) each rank is a
new process. `run_python` runs a script or a module in such a fork.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 5.0  # after the first failure, for the others to fail on their own


@dataclasses.dataclass
class Outcome:
    returncode: int | None
    """None: killed after the timeout."""
    value: object
    error: str
    """"ValueError: text", or empty."""
    output: str
    """Standard output and error, with the traceback."""
    seconds: float


class RanksFailedError(AssertionError):
    pass


def run_ranks(num_ranks, function, *args, timeout_seconds=120, **options):
    """Results of `function(*args)` by rank. Raises RanksFailedError with the output of the first rank that failed."""
    outcomes = rank_outcomes(
        num_ranks, function, *args, timeout_seconds=timeout_seconds, grace_seconds=GRACE_SECONDS, **options
    )
    failed = [(outcome.seconds, rank) for rank, outcome in enumerate(outcomes) if outcome.returncode != 0]
    if failed:
        raised = [(seconds, rank) for seconds, rank in failed if outcomes[rank].returncode is not None]
        rank = min(raised or failed)[1]
        how = "did not end" if outcomes[rank].returncode is None else f"ended with {outcomes[rank].returncode}"
        raise RanksFailedError(f"rank {rank} of {num_ranks} {how}:\n{outcomes[rank].output}")
    return [outcome.value for outcome in outcomes]


def rank_outcomes(
    num_ranks,
    function,
    *args,
    timeout_seconds=120,
    grace_seconds=None,
    nodes=None,
    environment=None,
    absent=(),
):
    """Outcomes by rank; all processes have ended, `grace_seconds` after the first failure at the latest (None: no such
    limit). `nodes[rank]` is a rank's node (tests/nodes.py), and the first one's address that of the store;
    `environment(rank)` overrides its environment, where None unsets a variable; ranks in `absent` never start.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "task").write_bytes(pickle.dumps((function, args, timeout_seconds)))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
        common |= {"LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if nodes:
            common |= {"MASTER_ADDR": nodes[0].address, "GLOO_SOCKET_IFNAME": nodes[0].interface}
        processes = {}
        for rank in set(range(num_ranks)) - set(absent):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | (environment(rank) if environment else {})
            variables = {name: value for name, value in (os.environ | common | own).items() if value is not None}
            processes[rank] = start_of(variables)(folder, rank, variables, nodes[rank] if nodes else None)
        ended = _wait(processes, timeout_seconds, grace_seconds)
        return [_outcome(Path(folder), rank, *ended.get(rank, (None, 0.0))) for rank in range(num_ranks)]


def start_of(variables):
    return _start_fork if variables.get("CUDA_VISIBLE_DEVICES") == "" else _start_process


def _start_process(folder, rank, variables, node=None):
    command = [*(node.prefix if node else ()), sys.executable, "-m", "tests.distributed", folder]
    with Path(folder, f"output-{rank}").open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=output, start_new_session=True)


class _Fork:
    """A fork of the server with the methods of Popen that this module uses."""

    def __init__(self, target, *args):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.rank_imports"])
        self._process = context.Process(target=target, args=args)
        with server_environment():
            self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    @property
    def returncode(self):
        return self._process.exitcode

    def wait(self):
        self._process.join()
        return self._process.exitcode


def _start_fork(folder, rank, variables, node=None):
    return _Fork(_run_fork, folder, rank, variables, node)


def run_python(*arguments, cwd=ROOT, environment=None, timeout_seconds=300):
    """``subprocess.run(["python", *arguments])`` with captured text, in a fork of the server: PyTorch, transformers and
    patrickstar are imported already. ``arguments`` begin with a script, ``-m`` or ``-c``.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, **(environment or {}), "CUDA_VISIBLE_DEVICES": ""}
        process = _Fork(_run_script, folder, [str(argument) for argument in arguments], str(cwd), variables)
        returncode, _ = _wait({0: process}, timeout_seconds, None)[0]
        texts = [Path(folder, name).read_text(errors="replace") for name in ("stdout", "stderr")]
        if returncode is None:
            raise subprocess.TimeoutExpired(arguments, timeout_seconds, *texts)
        return subprocess.CompletedProcess(arguments, returncode, *texts)


def _run_script(folder, arguments, cwd, variables):
    _become(cwd, variables, Path(folder, "stdout"), Path(folder, "stderr"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:0] = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    try:
        if arguments[0] == "-m":
            sys.argv = ["-m", *arguments[2:]]
            sys.path.insert(0, cwd)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.path.insert(0, cwd)
            exec(arguments[1], {"__name__": "__main__"})
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(cwd, arguments[0]).parent))
            runpy.run_path(str(Path(cwd, arguments[0])), run_name="__main__")
    finally:
        atexit._run_exitfuncs()


@contextlib.contextmanager
def server_environment():
    """The server sees no GPU: an import (torchao's, for example) might use CUDA, after which no fork can."""
    ours = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _run_fork(folder, rank, variables, node):
    output = Path(folder, f"output-{rank}")
    _become(ROOT, variables, output, output)
    if node:
        node.enter()
    _run_rank(folder)


def _become(cwd, variables, *outputs):
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    for stream, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)


def free_port():
    """An unused port below the range of outgoing connections, which could take it before a rank listens."""
    while True:
        port = random.randrange(10000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _wait(processes, timeout_seconds, grace_seconds):
    """{rank: (return code or None, seconds)}."""
    started = time.monotonic()
    deadline = started + timeout_seconds
    ended = {}
    try:
        while len(ended) < len(processes) and time.monotonic() < deadline:
            for rank, process in processes.items():
                if rank not in ended and process.poll() is not None:
                    ended[rank] = (process.returncode, time.monotonic() - started)
                    if process.returncode != 0 and grace_seconds is not None:
                        deadline = min(deadline, time.monotonic() + grace_seconds)
            time.sleep(0.02)
    finally:
        for process in processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it ends by itself now
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {rank: ended.get(rank, (None, time.monotonic() - started)) for rank in processes}


def _outcome(folder, rank, returncode, seconds):
    result, output = folder / f"result-{rank}", folder / f"output-{rank}"
    value, error = pickle.loads(result.read_bytes()) if result.exists() else (None, "")
    text = output.read_text(errors="replace") if output.exists() else ""
    return Outcome(returncode, value, error, text, seconds)


def _run_rank(folder):
    import torch

    torch.set_num_threads(1)
    result = Path(folder, f"result-{os.environ['RANK']}")  # a resize gives the process another rank
    function, args, timeout_seconds = pickle.loads(Path(folder, "task").read_bytes())
    gc.freeze()  # collections need not visit what the function's module imports
    faulthandler.dump_traceback_later(max(timeout_seconds - 3, 1))  # where it is when it is about to be killed
    value, error = None, ""
    try:
        value = function(*args)
    except BaseException as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    result.write_bytes(pickle.dumps((value, error)))
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.exit(1 if error else 0)


if __name__ == "__main__":
    _run_rank(sys.argv[1])

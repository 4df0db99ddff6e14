"""A Ray cluster on this machine with simulated GPUs, independent of other clusters: it has its own ports and folder,
and ends alone.

``~/.patrickstar/ones/cluster.json`` records the cluster of the last ``patrickstar ones start``, for other commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from patrickstar.ranks.addresses import split_address
from patrickstar.ranks.private_files import create_private

_NOTE = Path("~/.patrickstar/ones/cluster.json")
_FOLDER_PREFIX = "patrickstar-ray-"
_FOLDER_PARENT = "/tmp"  # noqa: S108 (the path of a Ray socket has at most 107 bytes; the folder has mode 0700)
_ADDRESS_FILE = "ray_current_cluster"  # written by Ray
_START_SECONDS = 180.0
_END_SECONDS = 60.0
_ANSWER_SECONDS = 2.0
_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class KnownCluster:
    """The cluster on which a scheduler was started."""

    address: str
    """``host:port`` of Ray's head."""
    pid: int = 0
    """The process that runs the cluster, if it was started here; else 0."""
    folder: str = ""
    """The folder of its sessions and logs, if it was started here."""

    @property
    def is_own(self) -> bool:
        """True for a cluster that was started here and still runs."""
        command = Path(f"/proc/{self.pid}/cmdline")
        return self.pid > 0 and command.exists() and self.folder.encode() in command.read_bytes()

    @property
    def answers(self) -> bool:
        """True if a server listens at its address."""
        try:
            with socket.create_connection(split_address(self.address), _ANSWER_SECONDS):
                return True
        except (OSError, ValueError):
            return False


def known_cluster() -> KnownCluster | None:
    """The recorded cluster; None if there is none, or no server listens at its address."""
    try:
        found = KnownCluster(**json.loads(_NOTE.expanduser().read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.answers else None


def note_cluster(cluster: KnownCluster) -> None:
    """Records the cluster for other commands of this user."""
    path = _NOTE.expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(create_private(new), "w") as file:
        json.dump(dataclasses.asdict(cluster), file)
    new.replace(path)


def start_local_cluster(num_gpus: int) -> KnownCluster:
    """Starts Ray on this machine with so many simulated GPUs, and waits until it runs.

    Raises:
        RuntimeError: it did not start; the message has the end of Ray's output.
    """
    folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=_FOLDER_PARENT)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"]
    command += [f"--num-gpus={num_gpus}", f"--temp-dir={folder}", "--disable-usage-stats"]
    log, address_file = Path(folder, "start.log"), Path(folder, _ADDRESS_FILE)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        address = address_file.read_text().strip() if address_file.exists() else ""
        if address and b"Ray runtime started" in log.read_bytes():
            return KnownCluster(address, process.pid, folder)
        time.sleep(_POLL_SECONDS)
    said = log.read_text(errors="replace")[-500:]
    _end(process.pid, folder)
    raise RuntimeError(f"Ray did not start: {said}")


def end_local_cluster(cluster: KnownCluster) -> None:
    """Ends a cluster of :func:`start_local_cluster`, with everything that runs on it."""
    _end(cluster.pid, cluster.folder)
    _NOTE.expanduser().unlink(missing_ok=True)


def _end(pid: int, folder: str) -> None:
    deadline = time.monotonic() + _END_SECONDS
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGTERM)  # Ray ends its processes, which are in its session
        while time.monotonic() < deadline and _runs(pid):
            time.sleep(_POLL_SECONDS)
        os.killpg(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):  # it may be no child of this process
        os.waitpid(pid, os.WNOHANG)
    return Path(f"/proc/{pid}").exists()

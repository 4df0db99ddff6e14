"""The process of one rank, on an actor of its own. Ray imports this module for each rank, so it imports no PyTorch."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import ray

from patrickstar.ranks.addresses import listen
from patrickstar.ranks.private_files import append_private, create_private

_TAIL_BYTES = 2000
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """An actor's node and GPUs."""

    node_id: str
    """Ray's."""
    address: str
    port: int
    """A free one."""
    gpus: tuple[str, ...]
    """Ids on the node."""


class RankProcess:
    """An actor: the process of one rank, on the actor's GPU."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None
        self._secret_file: Path | None = None

    def place(self) -> Place:
        """Where this actor is."""
        address = ray.util.get_node_ip_address()
        with listen(address, 0) as probe:
            port = probe.getsockname()[1]
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return Place(node_id=ray.get_runtime_context().get_node_id(), address=address, port=port, gpus=gpus)

    def start(
        self, words: Sequence[str], folder: str, environment: dict[str, str], secret: tuple[str, str], log: str
    ) -> None:
        """Starts the script, which ends with this actor. A private file beside the log holds the run's secret while
        the process runs.

        Args:
            words: the script and its arguments.
            folder: working directory.
            environment: variables in addition to the node's.
            secret: the variable that names the private file, and the secret (hexadecimal).
            log: path of the output.
        """
        self._log = Path(log)
        self._log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._secret_file = self._log.with_suffix(f".{os.getpid()}.secret")
        variable, value = secret
        with os.fdopen(create_private(self._secret_file), "w") as file:
            file.write(value)
        with os.fdopen(append_private(self._log), "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env={**os.environ, **environment, variable: str(self._secret_file)},
                stdout=output,
                stderr=output,
                preexec_fn=_die_with_parent,
            )

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        status = None if self._process is None else self._process.poll()
        if status is not None:
            self._forget_secret()
        return status

    def kill(self) -> None:
        """Kills the process, and waits for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget_secret()

    def _forget_secret(self) -> None:
        if self._secret_file is not None:
            self._secret_file.unlink(missing_ok=True)

    def tail(self) -> str:
        """The end of its output."""
        if self._log is None:
            return ""
        return self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

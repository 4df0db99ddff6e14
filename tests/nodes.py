"""Two nodes on one machine: network namespaces joined by a cable, with host names of their own.

    with two_nodes() as nodes:
        run_ranks(4, function, nodes=[nodes[0]] * 2 + [nodes[1]] * 2)

They share the machine's files and processes. Without the right to make namespaces both are this machine, at an unusual
address; `num_nodes` tells.
"""

import contextlib
import ctypes
import dataclasses
import os
import socket
import subprocess
from pathlib import Path

_NEW_UTS = 0x04000000  # CLONE_NEWUTS
_INTERFACE = "eth0"


@dataclasses.dataclass(frozen=True)
class Node:
    address: str
    interface: str
    name: str = ""
    """Name of the network namespace and of the host; empty: this machine."""

    @property
    def prefix(self):
        """Words before a command that runs on this node."""
        if not self.name:
            return []
        rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
        return ["ip", "netns", "exec", self.name, *rename, self.name]

    def enter(self):
        """Moves this process to the node. Threads that run already stay where they are."""
        if not self.name:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        network = os.open(Path("/run/netns", self.name), os.O_RDONLY)
        for entered in (libc.setns(network, 0), libc.unshare(_NEW_UTS)):
            assert entered == 0, os.strerror(ctypes.get_errno())
        os.close(network)
        socket.sethostname(self.name)


@contextlib.contextmanager
def two_nodes():
    names = [f"ps{os.getpid()}{side}" for side in "ab"]
    nodes = [Node(f"10.213.77.{number}", _INTERFACE, name) for number, name in enumerate(names, 1)]
    try:
        made = all(_ip("netns", "add", name) for name in names)
        cable = [["netns", name, "name", _INTERFACE] for name in names]
        made = made and _ip("link", "add", *cable[0], "type", "veth", "peer", *cable[1])
        for node in nodes if made else ():
            made = made and _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", _INTERFACE)
            made = made and all(_ip("-n", node.name, "link", "set", one, "up") for one in (_INTERFACE, "lo"))
        yield nodes if made else [Node("127.0.0.2", "lo")] * 2
    finally:
        for name in names:
            _ip("netns", "del", name)


def num_nodes(nodes):
    return len({node.name for node in nodes})


def _ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True).returncode == 0

"""Made-up machines: the files below / that describe CPUs to a process."""

import dataclasses
from pathlib import Path

from patrickstar import _C


@dataclasses.dataclass(frozen=True)
class Machine:
    """``nodes[i]`` are the cores of node i; a core is a tuple of its CPUs (hyper-threads)."""

    nodes: list[list[tuple[int, ...]]]

    @property
    def cpus(self) -> list[int]:
        return sorted(cpu for node in self.nodes for core in node for cpu in core)

    def write(self, root: Path) -> None:
        folder = root / "sys/devices/system/node"
        put(folder / "online", _as_list(range(len(self.nodes))))
        for node, cores in enumerate(self.nodes):
            put(folder / f"node{node}/cpulist", _as_list(cpu for core in cores for cpu in core))
            for core in cores:
                for cpu in core:
                    siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
                    put(siblings, _as_list(core))

    def read(self, root: Path, cpus: list[int] | None = None) -> _C.CpuTopology:
        self.write(root)
        return _C.read_cpu_topology(self.cpus if cpus is None else cpus, str(root))


def hyper_threaded(num_nodes: int, cores_per_node: int, threads_per_core: int) -> Machine:
    """Numbers CPUs as Linux does on x86: the first hyper-threads of all cores of all nodes, then the second ones."""
    total = num_nodes * cores_per_node
    return Machine(
        [
            [
                tuple(node * cores_per_node + core + thread * total for thread in range(threads_per_core))
                for core in range(cores_per_node)
            ]
            for node in range(num_nodes)
        ]
    )


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _as_list(numbers) -> str:
    return ",".join(str(number) for number in sorted(numbers))

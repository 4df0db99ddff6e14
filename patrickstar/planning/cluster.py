"""Several GPUs: what those of a node share, and how fast chunks travel between ranks.

*Within a node* GPUs share the host's memory: uploads, downloads and updates of all ranks read and write it. A rank's
transfers and updates get what the others leave of its part on average over the step (:meth:`Cluster.rates`).

*Between ranks* a collective over p of them takes ``latency + bytes x (p - 1) / p / bus bandwidth``: every rank gets (or
gives) that much over its own link. Of what comes from other nodes

* a gather (NCCL's ring) lets each value into a node once, over all adapters of the node together;
* a scatter sends each rank's share straight to that rank, since its mean must be summed in the order of ranks: every
  GPU has (N - 1) / N of the whole chunk to send over its own adapter, N being the number of nodes.

The latency is that of a ring: p - 1 hops, of which N - 1 lead to other nodes, as in NCCL's own model
(src/graph/tuning.cc, ring, protocol Simple: 8.4 us, and 3.4 us per hop over NVLink, 14 us over a network).

*Beside collectives* kernels take longer, by one factor whatever the collectives are (:meth:`Cluster.slowdown`).
"""

from __future__ import annotations

import dataclasses

from patrickstar import _C
from patrickstar.planning.machines import H200, Machine
from patrickstar.planning.update_costs import UpdateRates
from patrickstar.sequence.choice import Links

_COLLECTIVE_SECONDS = 8.4e-6
_NVLINK_HOP_SECONDS = 3.4e-6
_NETWORK_HOP_SECONDS = 14e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """How GPUs of different nodes reach each other."""

    name: str
    gbps: float | None
    """Of each GPU's own adapter, each way, 1e9 bytes per second; None: nodes are of one NVLink domain."""


# 400 and 25 Gbit/s, of which 92 % are taken to be of use (not measured here).
LINKS = {
    "nvlink": Link(name="nvlink", gbps=None),
    "ib400": Link(name="ib400", gbps=46.0),
    "eth25": Link(name="eth25", gbps=2.9),
}


def parse_link(text: str) -> Link:
    """The link that ``--link`` names: one of ``LINKS``, or GB/s for each GPU.

    Raises:
        ValueError: it is neither.
    """
    if text in LINKS:
        return LINKS[text]
    try:
        gbps = float(text)
    except ValueError:
        gbps = 0.0
    if not 0 < gbps < float("inf"):
        raise ValueError(f"--link is {text!r}; give one of {', '.join(LINKS)}, or GB/s for each GPU, such as 12.5")
    return Link(name=f"{gbps:g} GB/s", gbps=gbps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTraffic:
    """What one rank moves through the host's memory on average over a step, 1e9 bytes per second."""

    upload_gbps: float = 0.0
    download_gbps: float = 0.0
    adam_gbps: float = 0.0


@dataclasses.dataclass(frozen=True)
class LineRates:
    """Between ranks that differ in one axis of a mesh."""

    panels_gbps: float
    """At which what goes from one to all comes to each, 1e9 bytes per second."""
    sums_gbps: float
    """At which summands come to the ranks that add them up."""
    latency_seconds: float
    """Of each exchange, on top of the time of its bytes."""


def _latency(nvlink_hops: int, network_hops: int) -> float:
    return _COLLECTIVE_SECONDS + nvlink_hops * _NVLINK_HOP_SECONDS + network_hops * _NETWORK_HOP_SECONDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """So many nodes of so many GPUs, each GPU a rank."""

    nodes: int = 1
    gpus_per_node: int = 1
    link: Link = LINKS["nvlink"]
    """Between nodes. Within a node it is NVLink."""
    matrix_ranks: int = 1
    """GPUs, neighbours, that share matrices. Those that have the same of these share chunks."""

    @property
    def num_ranks(self) -> int:
        """Number of GPUs on all nodes together."""
        return self.nodes * self.gpus_per_node

    def of_size(self, num_gpus: int) -> Cluster:
        """The same with so many GPUs in all: whole nodes, or a part of one.

        Raises:
            ValueError: the last node would not be full.
        """
        per_node = min(num_gpus, self.gpus_per_node)
        if num_gpus < 1 or num_gpus % per_node:
            raise ValueError(f"{num_gpus} GPUs are not whole nodes of {self.gpus_per_node} GPUs")
        if num_gpus % self.matrix_ranks:
            raise ValueError(f"{num_gpus} GPUs are not whole meshes of {self.matrix_ranks} GPUs that share matrices")
        return dataclasses.replace(self, nodes=num_gpus // per_node, gpus_per_node=per_node)

    @property
    def chunk_ranks(self) -> int:
        """Number of GPUs that share each chunk."""
        return self.num_ranks // self.matrix_ranks

    @property
    def chunk_group(self) -> Cluster:
        """Those that share chunks, as a cluster of their own."""
        if self.matrix_ranks == 1:
            return self
        here = max(self.gpus_per_node // self.matrix_ranks, 1)
        return dataclasses.replace(
            self, nodes=self.chunk_ranks // here, gpus_per_node=min(here, self.chunk_ranks), matrix_ranks=1
        )

    def gather_gbps(self, machine: Machine) -> float:
        """Bus bandwidth of gathers; 0 with one rank, where there are none."""
        if self.link.gbps is None:
            return self._bus_gbps(machine.nvlink_gather_gbps, None)
        return self._bus_gbps(machine.nvlink_gather_gbps, self.gpus_per_node * self.link.gbps)

    def scatter_gbps(self, machine: Machine) -> float:
        """Bus bandwidth of scatters; 0 with one rank, where there are none."""
        return self._bus_gbps(machine.nvlink_scatter_gbps, self.link.gbps)

    def _bus_gbps(self, within: float, between: float | None) -> float:
        """``between``: how fast what comes from other nodes, (N - 1) / N of a chunk, gets to a node or rank."""
        if self.num_ranks == 1:
            return 0.0
        if self.nodes == 1 or between is None:
            return within
        from_ranks = (self.num_ranks - 1) / self.num_ranks
        from_nodes = (self.nodes - 1) / self.nodes
        return min(within, between * from_ranks / from_nodes)

    def line_rates(self, machine: Machine, size: int, stride: int) -> LineRates:
        """Of ``size`` ranks of which each is ``stride`` ranks after the one before, while all others do the same. What
        goes to all enters each node once, over the adapters of those that are there, and one sum leaves each node.
        """
        here = min(max(self.gpus_per_node // stride, 1), size)
        panels, sums = machine.nvlink_gather_gbps, machine.nvlink_scatter_gbps
        network_hops = 0
        if here < size and self.link.gbps is not None:
            panels, sums = (min(gbps, here * self.link.gbps) for gbps in (panels, sums))
            network_hops = -(-size // here) - 1
        return LineRates(panels, sums, _latency(size - 1 - network_hops, network_hops))

    def pass_on_gbps(self, machine: Machine, size: int, stride: int = 1) -> float:
        """What a rank sends to the next one, ``stride`` ranks after it, or to each of a sequence, while ``size`` do the
        same: within a node as much of NVLink as on an H200's.
        """
        within = Links.gbps * machine.nvlink_gather_gbps / H200.nvlink_gather_gbps
        return within if size * stride <= self.gpus_per_node or self.link.gbps is None else min(within, self.link.gbps)

    @property
    def latency_seconds(self) -> float:
        """Latency of each gather and scatter, on top of the time of its bytes; 0 with one rank."""
        if self.num_ranks == 1:
            return 0.0
        network_hops = 0 if self.link.gbps is None else self.nodes - 1
        return _latency(self.num_ranks - 1 - network_hops, network_hops)

    def slowdown(self, machine: Machine) -> float:
        """Of the GPU's kernels, by what the others do meanwhile; 1 with one rank."""
        return machine.several_gpus_slowdown if self.num_ranks > 1 else 1.0

    def host_gbps(self, machine: Machine) -> float:
        """One rank's part of its host's memory bandwidth, 1e9 bytes per second."""
        sockets = -(-self.gpus_per_node // machine.gpus_per_socket)
        return machine.socket_memory_gbps * sockets / self.gpus_per_node

    def rates(self, machine: Machine, traffic: HostTraffic, updates: UpdateRates | None = None) -> _C.Rates:
        """What the simulator takes, where each rank moves ``traffic``. With one GPU per node, the machine's own rates:
        they were measured so. ``updates``: of what is updated; None: Adam on float32 states.
        """
        updates = updates or machine.update_rates()
        rates = machine.rates(updates)
        group = self.chunk_group
        rates.gather_gbps = group.gather_gbps(machine)
        rates.scatter_gbps = group.scatter_gbps(machine)
        rates.collective_latency_seconds = group.latency_seconds
        rates.disk_read_gbps /= self.gpus_per_node
        rates.disk_write_gbps /= self.gpus_per_node
        if self.gpus_per_node == 1:
            return rates
        wanted = {
            "upload": machine.upload_gbps,
            "download": machine.download_gbps,
            "adam": updates.host_params_per_second * updates.host_bytes * 1e-9,
        }
        used = {name: getattr(traffic, f"{name}_gbps") for name in wanted}
        there = self.host_gbps(machine)
        share = {}
        for name, gbps in wanted.items():
            left = there - sum(other for key, other in used.items() if key != name)
            fair = there * gbps / sum(wanted.values())  # if all three were busy all the time
            share[name] = min(gbps, max(left, fair))
        rates.upload_gbps = share["upload"]
        rates.download_gbps = share["download"]
        rates.host_adam_params_per_second = share["adam"] / updates.host_bytes * 1e9
        return rates

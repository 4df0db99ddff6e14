"""Several GPUs: shared host memory within a node, and collectives between ranks.

*Within a node* GPUs share the host's memory, which uploads, downloads and updates of all ranks use. The simulator gets
the bandwidth that the other uses leave on average over the step (:meth:`Cluster.rates`).

*Between ranks* a collective over p ranks takes ``latency + bytes x (p - 1) / p / bus bandwidth``. Each rank receives
(or sends) that much over its own link. With N nodes, of the traffic between nodes
* an all-gather (NCCL's ring) enters each node once, over all adapters of the node together;
* a reduce-scatter sends each shard straight to its rank, because means are summed in rank order: every GPU sends (N -
  1) / N of the whole chunk over its own adapter.
The latency is a ring's: p - 1 hops, N - 1 of them between nodes, as in NCCL's model (src/graph/tuning.cc, ring,
protocol Simple: 8.4 us, and 3.4 us per hop over NVLink, 14 us over a network).

*During collectives* kernels slow down by a constant factor (:meth:`Cluster.slowdown`).
"""

from __future__ import annotations

import dataclasses

from patrickstar import _C
from patrickstar.planning.machines import H200, Machine
from patrickstar.planning.node_links import LINKS, Link
from patrickstar.planning.update_costs import UpdateRates
from patrickstar.sequence.choice import Links

_COLLECTIVE_SECONDS = 8.4e-6
_NVLINK_HOP_SECONDS = 3.4e-6
_NETWORK_HOP_SECONDS = 14e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTraffic:
    """One rank's average host memory traffic over a step, 1e9 bytes per second."""

    upload_gbps: float = 0.0
    download_gbps: float = 0.0
    adam_gbps: float = 0.0


@dataclasses.dataclass(frozen=True)
class LineRates:
    """Rates between ranks of one mesh dimension group."""

    panels_gbps: float
    """Rate at which each rank receives broadcast panels, 1e9 bytes per second."""
    sums_gbps: float
    """Rate at which the adding ranks receive summands."""
    latency_seconds: float
    """Latency of each exchange, on top of its bytes."""


def _latency(nvlink_hops: int, network_hops: int) -> float:
    return _COLLECTIVE_SECONDS + nvlink_hops * _NVLINK_HOP_SECONDS + network_hops * _NETWORK_HOP_SECONDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes and GPUs; each GPU is a rank."""

    nodes: int = 1
    gpus_per_node: int = 1
    link: Link = LINKS["nvlink"]
    """Link between nodes; NVLink within a node."""
    matrix_ranks: int = 1
    """Adjacent GPUs that share matrices. GPUs with equal positions in their groups share chunks."""

    @property
    def num_ranks(self) -> int:
        """Number of GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    def of_size(self, num_gpus: int) -> Cluster:
        """Returns a cluster of ``num_gpus`` GPUs: whole nodes, or a part of one.

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
        """The GPUs that share chunks, as a cluster."""
        if self.matrix_ranks == 1:
            return self
        here = max(self.gpus_per_node // self.matrix_ranks, 1)
        return dataclasses.replace(
            self, nodes=self.chunk_ranks // here, gpus_per_node=min(here, self.chunk_ranks), matrix_ranks=1
        )

    def gather_gbps(self, machine: Machine) -> float:
        """Bus bandwidth of all-gathers; 0 with one rank."""
        if self.link.gbps is None:
            return self._bus_gbps(machine.nvlink_gather_gbps, None)
        return self._bus_gbps(machine.nvlink_gather_gbps, self.gpus_per_node * self.link.gbps)

    def scatter_gbps(self, machine: Machine) -> float:
        """Bus bandwidth of reduce-scatters; 0 with one rank."""
        return self._bus_gbps(machine.nvlink_scatter_gbps, self.link.gbps)

    def _bus_gbps(self, within: float, between: float | None) -> float:
        """``between``: rate into a node or rank of data from other nodes, (N - 1) / N of a chunk."""
        if self.num_ranks == 1:
            return 0.0
        if self.nodes == 1 or between is None:
            return within
        from_ranks = (self.num_ranks - 1) / self.num_ranks
        from_nodes = (self.nodes - 1) / self.nodes
        return min(within, between * from_ranks / from_nodes)

    def line_rates(self, machine: Machine, size: int, stride: int) -> LineRates:
        """Rates among ``size`` ranks spaced ``stride`` apart, while all other such groups do the same. A panel enters
        each node once, over the adapters of the group's ranks there. One sum leaves each node.
        """
        here = min(max(self.gpus_per_node // stride, 1), size)
        panels, sums = machine.nvlink_gather_gbps, machine.nvlink_scatter_gbps
        network_hops = 0
        if here < size and self.link.gbps is not None:
            panels, sums = (min(gbps, here * self.link.gbps) for gbps in (panels, sums))
            network_hops = -(-size // here) - 1
        return LineRates(panels, sums, _latency(size - 1 - network_hops, network_hops))

    def pass_on_gbps(self, machine: Machine, size: int, stride: int = 1) -> float:
        """Rate at which a rank sends to the rank ``stride`` after it, or to each of its sequence, while ``size`` ranks
        do the same. Within a node: the NVLink share measured on an H200.
        """
        within = Links.gbps * machine.nvlink_gather_gbps / H200.nvlink_gather_gbps
        return within if size * stride <= self.gpus_per_node or self.link.gbps is None else min(within, self.link.gbps)

    @property
    def latency_seconds(self) -> float:
        """Latency of each collective, on top of its bytes; 0 with one rank."""
        if self.num_ranks == 1:
            return 0.0
        network_hops = 0 if self.link.gbps is None else self.nodes - 1
        return _latency(self.num_ranks - 1 - network_hops, network_hops)

    def slowdown(self, machine: Machine) -> float:
        """Factor by which collectives slow down kernels; 1 with one rank."""
        return machine.several_gpus_slowdown if self.num_ranks > 1 else 1.0

    def host_gbps(self, machine: Machine) -> float:
        """One rank's share of its host's memory bandwidth, 1e9 bytes per second."""
        sockets = -(-self.gpus_per_node // machine.gpus_per_socket)
        return machine.socket_memory_gbps * sockets / self.gpus_per_node

    def rates(self, machine: Machine, traffic: HostTraffic, updates: UpdateRates | None = None) -> _C.Rates:
        """Returns the simulator's rates when each rank moves ``traffic``. With one GPU per node they are the machine's
        measured rates. ``updates``: rates of the optimizer; None: Adam on float32 states.
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
            fair = there * gbps / sum(wanted.values())  # share if all three were always busy
            share[name] = min(gbps, max(left, fair))
        rates.upload_gbps = share["upload"]
        rates.download_gbps = share["download"]
        rates.host_adam_params_per_second = share["adam"] / updates.host_bytes * 1e9
        return rates

"""Actors of ranks, each on a GPU of its own, and the GPUs that Ray has."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from patrickstar.ones.cluster.placement import choose_nodes
from patrickstar.ones.cluster.rank_process import RankProcess
from patrickstar.ones.cluster.submission import Submission
from patrickstar.ones.jobs import Cluster

_GPUS_WAIT_SECONDS = 20.0
_DIVISION_SECONDS = 3.0
"""Time for GPUs of a reservation that is divided; others may take them meanwhile."""
_START_SECONDS = 300.0
"""Time for the actors of ranks to start, even on a loaded node."""
_TYPE_SHARE = 0.001
"""Share of a node's resource that names its GPUs' type, by Ray's custom."""


def type_resource(gpu_type: str) -> str:
    """Ray's resource of nodes with GPUs of a type, such as H100."""
    return f"accelerator_type:{gpu_type}"


def gpus_by_node(gpu_type: str = "") -> dict[str, int]:
    """GPUs of each living node, by id; of one type, or of any."""
    has_type = type_resource(gpu_type)
    return {
        node["NodeID"]: int(node["Resources"].get("GPU", 0))
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("GPU", 0) >= 1 and (not gpu_type or has_type in node["Resources"])
    }


def cluster_now() -> Cluster | None:
    """The cluster as Ray reports it now; None: it has no GPUs."""
    per_node = gpus_by_node().values()
    return Cluster(sum(per_node), max(per_node)) if per_node else None


def num_gpus_by_type() -> dict[str, int]:
    """GPUs of living nodes by type; nodes whose type Ray does not know are left out."""
    kinds = {name for node in ray.nodes() for name in node["Resources"] if name.startswith(type_resource(""))}
    return {kind: sum(gpus_by_node(kind).values()) for kind in (name.partition(":")[2] for name in kinds)}


def free_gpus(gpu_type: str = "") -> dict[str, int]:
    """Free GPUs of each living node, by id."""
    available = available_resources_per_node()
    return {node: int(available.get(node, {}).get("GPU", 0)) for node in gpus_by_node(gpu_type)}


@contextlib.contextmanager
def _all_at_once(bundles: Sequence[Mapping[str, float]], timeout_seconds: float) -> Iterator[Counter[str]]:
    """Context in which one placement group holds all bundles. Ray gives it all or none, so it holds nothing while it
    waits. Yields the number of bundles on each node.

    Raises:
        RuntimeError: they were not free within the timeout.
    """
    whole = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    try:
        if not whole.wait(timeout_seconds):
            raise RuntimeError("other jobs hold them")
        yield Counter(placement_group_table(whole)["bundles_to_node_id"].values())
    finally:
        remove_placement_group(whole)


def place_groups(num_groups: int, submission: Submission, present: Collection[str]) -> list[PlacementGroup]:
    """A placement group for each inner group of ranks, on the nodes of :func:`choose_nodes`.

    All GPUs are reserved at once, and the reservation is then divided. If another job takes one of them meanwhile, it
    begins again.

    Raises:
        RuntimeError: the GPUs were not free in time; none is held then.
    """
    size, kind = submission.inner_group, submission.gpu_type
    bundle = {"GPU": float(size)} | ({type_resource(kind): _TYPE_SHARE} if kind else {})
    deadline = time.monotonic() + _GPUS_WAIT_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        with _all_at_once([bundle] * num_groups, left) as reserved:
            free = Counter(free_gpus(kind))
            free.update({node: size * count for node, count in reserved.items()})
            nodes = choose_nodes(free, num_groups, size, present)
        groups = [placement_group([bundle], strategy="STRICT_PACK", _soft_target_node_id=node) for node in nodes]
        until = time.monotonic() + _DIVISION_SECONDS
        if all(group.wait(max(until - time.monotonic(), 0.0)) for group in groups):
            return groups
        for group in groups:
            remove_placement_group(group)
    raise RuntimeError("other jobs took them first")


class PlacedRanks:
    """Ranks that were started together, all or none. A rank, or each inner group, has a placement group of its own, so
    that its GPUs are free when it leaves.

    Args:
        count: of ranks.
        submission: the job.
        present: ids of nodes where the job has ranks.

    Raises:
        RuntimeError: the GPUs were not free in time, or their processes did not start; none is kept then.
    """

    def __init__(self, count: int, submission: Submission, present: set[str]):
        size = submission.inner_group
        try:
            groups = place_groups(count // size, submission, present)
        except RuntimeError as error:
            raise RuntimeError(f"{count} GPUs were not free within {_GPUS_WAIT_SECONDS:g} s: {error}") from error
        rank_actor = ray.remote(num_cpus=0, num_gpus=1)(RankProcess)
        self._groups = {
            rank_actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote(): group
            for group in groups
            for _ in range(size)
        }
        try:
            self.places = ray.get([actor.place.remote() for actor in self.actors], timeout=_START_SECONDS)
            """The result of :meth:`RankProcess.place` for each."""
        except ray.exceptions.RayError as error:
            for actor in self.actors:
                self.drop(actor)
            raise RuntimeError(f"processes on {count} GPUs did not start: {error}") from error

    @property
    def actors(self) -> list[Any]:
        """The remaining actors, in the order of their ranks at the start."""
        return list(self._groups)

    @property
    def nodes(self) -> set[str]:
        """Ids of the nodes where they were started."""
        return {place.node_id for place in self.places}

    def drop(self, actor: Any) -> None:
        """Ends a rank; its group's GPUs are free when its last rank has ended."""
        ray.kill(actor)
        group = self._groups.pop(actor)
        if all(other is not group for other in self._groups.values()):
            remove_placement_group(group)

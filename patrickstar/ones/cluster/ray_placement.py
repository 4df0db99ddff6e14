"""Actors of ranks, each on a GPU of its own, and the GPUs that Ray has."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
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
_TYPE_RESOURCE = "accelerator_type:"
"""Beginning of the name of a resource that Ray gives nodes with GPUs of a type."""


def _gpus_by_type() -> dict[str, dict[str, int]]:
    """GPUs of each living node, by type and the node's id; the type is "" if Ray does not know it."""
    found: dict[str, dict[str, int]] = {}
    for node in ray.nodes():
        resources = node["Resources"]
        if node["Alive"] and resources.get("GPU", 0) >= 1:
            kinds = [name.removeprefix(_TYPE_RESOURCE) for name in resources if name.startswith(_TYPE_RESOURCE)]
            found.setdefault(min(kinds, default=""), {})[node["NodeID"]] = int(resources["GPU"])
    return found


def pools_now() -> dict[str, Cluster]:
    """The cluster by types of GPUs, as Ray reports it now; empty: it has none."""
    return {kind: Cluster(sum(gpus.values()), max(gpus.values())) for kind, gpus in sorted(_gpus_by_type().items())}


def _free_gpus(nodes: Iterable[str]) -> Counter[str]:
    available = available_resources_per_node()
    return Counter({node: int(available.get(node, {}).get("GPU", 0)) for node in nodes})


def _on(*nodes: str) -> dict[str, str]:
    """Label selector of a bundle that these nodes may hold."""
    return {"ray.io/node-id": f"in({','.join(nodes)})"}


@contextlib.contextmanager
def _reserved(num_groups: int, size: int, nodes: Iterable[str], timeout_seconds: float) -> Iterator[Counter[str]]:
    """Context in which one placement group holds GPUs of some nodes. Ray gives it all or none, so it holds nothing
    while it waits. Yields the number of inner groups on each node.

    Raises:
        RuntimeError: they were not free within the timeout.
    """
    bundles, selectors = [{"GPU": float(size)}] * num_groups, [_on(*nodes)] * num_groups
    whole = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
    try:
        if not whole.wait(timeout_seconds):
            raise RuntimeError("other jobs hold them")
        yield Counter(placement_group_table(whole)["bundles_to_node_id"].values())
    finally:
        remove_placement_group(whole)


def place_groups(num_groups: int, submission: Submission, present: Collection[str]) -> list[PlacementGroup]:
    """A placement group for each inner group of ranks, on nodes with GPUs of the job's type (:func:`choose_nodes`).

    All GPUs are reserved at once, and the reservation is then divided. If another job takes one of them meanwhile, it
    begins again.

    Raises:
        RuntimeError: the GPUs were not free in time; none is held then.
    """
    size = submission.inner_group
    deadline = time.monotonic() + _GPUS_WAIT_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        those = _gpus_by_type().get(submission.gpu_type)
        if not those:
            raise RuntimeError(f"no node has GPUs of type {submission.gpu_type or 'unknown'}")
        with _reserved(num_groups, size, those, left) as found:
            free = _free_gpus(those) + Counter({node: size * count for node, count in found.items()})
            nodes = choose_nodes(free, num_groups, size, present)
        groups = [
            placement_group([{"GPU": float(size)}], strategy="STRICT_PACK", bundle_label_selector=[_on(node)])
            for node in nodes
        ]
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

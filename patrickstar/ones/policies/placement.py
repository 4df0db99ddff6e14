"""Placement: assigns GPUs to jobs. Jobs whose number is unchanged keep theirs, others get few nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from patrickstar.ones.jobs import BatchRule, Cluster, Job, JobState
from patrickstar.ones.measurements import DISTINCT
from patrickstar.ones.policies.protocol import Grant

_WORTH_A_CHANGE = 1.05  # goodput after a change of the batch over that before it
_WORTH_A_TRY = 0.9  # progress per sample of a batch that is tried, over that of the present one


def _as_measured(state: JobState) -> Job:
    return state.job


def place(
    sizes: Mapping[str, int],
    jobs: Sequence[JobState],
    cluster: Cluster,
    rule: BatchRule,
    view: Callable[[JobState], Job] = _as_measured,
) -> dict[str, Grant]:
    """Grants of these sizes, with batches by ``rule`` for the job as ``view`` has it.

    A job that keeps its size keeps its GPUs; a shrinking one keeps some of its own. Others are placed by
    descending size: on the fullest node with enough GPUs, else on the nodes with most free GPUs.

    Raises:
        ValueError: the sizes exceed the cluster.
    """
    total = sum(sizes.values())
    if total > cluster.num_gpus:
        raise ValueError(f"sizes add up to {total} GPUs and the cluster has {cluster.num_gpus}; a policy is wrong")
    held: dict[str, Grant] = {}
    free = set(range(cluster.num_gpus))
    changing = []
    for state in jobs:
        size = sizes.get(state.job.name, 0)
        if size and size == len(state.gpus):
            held[state.job.name] = Grant(state.gpus, _batch_in_place(state, view(state), rule, cluster))
            free.difference_update(state.gpus)
        elif size:
            changing.append((size, state))
    for size, state in sorted(changing, key=lambda item: -item[0]):
        gpus = _choose(size, state.gpus, free, cluster)
        free.difference_update(gpus)
        held[state.job.name] = Grant(gpus, view(state).batch_size(size, rule, cluster.gpus_per_node))
    return held


def place_on_types(
    sizes: Mapping[str, Sequence[tuple[JobState, int]]], pools: Mapping[str, Cluster], rule: BatchRule
) -> dict[str, Grant]:
    """Grants of these sizes by type of GPUs; states on other types than a job's own hold no GPUs."""
    grants: dict[str, Grant] = {}
    for kind, chosen in sizes.items():
        numbers = {state.job.name: num_gpus for state, num_gpus in chosen}
        placed = place(numbers, [state for state, _ in chosen], pools[kind], rule)
        grants |= {name: dataclasses.replace(grant, gpu_type=kind) for name, grant in placed.items()}
    return grants


def _batch_in_place(state: JobState, job: Job, rule: BatchRule, cluster: Cluster) -> int:
    """The batch of a job that keeps its GPUs. Noise scales vary, so a job with listed batches keeps its batch too,
    unless another is better by :data:`_WORTH_A_CHANGE`, and until the present one was measured.
    """
    size, present = len(state.gpus), state.batch_size
    best = job.batch_size(size, rule, cluster.gpus_per_node)
    if present not in job.batches_on(size) or rule is not BatchRule.BEST_GOODPUT:
        return best
    measured = {step.batch_size for step in state.observed if step.num_gpus == size}
    if present not in measured:
        return present
    if size == 1 and len(measured) == 1 and state.run_since_resize_s > 0:
        tried = _batch_to_try(job, present)
        if tried is not None:
            return tried
    now, then = job.goodput(size, np.array([present, best]), cluster.num_nodes_of(state.gpus))
    return best if then > _WORTH_A_CHANGE * now else present


def _batch_to_try(job: Job, present: int) -> int | None:
    """On one GPU with one measured batch: the next larger one from which the fit tells a pass's constant part, if its
    samples are worth nearly as much.
    """
    least_worth = _WORTH_A_TRY * job.efficiency(present)
    larger = (batch for batch in job.batches_on(1) if batch >= DISTINCT * present)
    return min((batch for batch in larger if job.efficiency(batch) >= least_worth), default=None)


def _choose(size: int, own: tuple[int, ...], free: set[int], cluster: Cluster) -> tuple[int, ...]:
    nodes: dict[int, list[int]] = {}
    for gpu in sorted(free):
        nodes.setdefault(gpu // cluster.gpus_per_node, []).append(gpu)
    own_nodes = {gpu // cluster.gpus_per_node for gpu in own}
    chosen: list[int] = []
    while len(chosen) < size:
        needed = size - len(chosen)
        enough = [node for node, gpus in nodes.items() if len(gpus) >= needed]
        if enough:
            node = min(enough, key=lambda node: (len(nodes[node]), node not in own_nodes, node))
        else:
            node = max(nodes, key=lambda node: (len(nodes[node]), node in own_nodes, -node))
        chosen += nodes.pop(node)[:needed]
    return tuple(sorted(chosen))


def rigid(order: Sequence[JobState], cluster: Cluster) -> dict[str, int]:
    """Requested sizes for jobs in this order, as long as they fit; jobs that do not are skipped."""
    sizes, free = {}, cluster.num_gpus
    for state in order:
        size = state.job.rigid_size(cluster)
        if size <= free:
            sizes[state.job.name] = size
            free -= size
    return sizes

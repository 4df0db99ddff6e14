"""Priorities and quotas: each class of jobs is given the GPUs that the classes before it left. Pure functions.

A class has the jobs of one priority. Jobs of a user with a quota are a class of their own, which gets at most the quota
and comes before others of its priority. The policy decides within each class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from patrickstar.ones.cluster.submission import Submission
from patrickstar.ones.jobs import Cluster, JobState
from patrickstar.ones.policies.protocol import Grant, Policy


def decide_in_classes(
    policy: Policy,
    now: float,
    states: Sequence[JobState],
    submissions: Mapping[str, Submission],
    cluster: Cluster,
    quotas: Mapping[str, int],
) -> dict[str, Grant]:
    """The grants of all classes; only the numbers of their GPUs count.

    Args:
        policy: decides.
        now: seconds of the cluster's clock.
        states: of all jobs.
        submissions: by job.
        cluster: the whole cluster.
        quotas: most GPUs of a user's jobs together.
    """
    classes: dict[tuple[int, str], list[JobState]] = {}
    for state in states:
        submission = submissions[state.job.name]
        user = submission.user if submission.user in quotas else ""
        classes.setdefault((-submission.priority, user), []).append(state)
    if len(classes) == 1 and not any(user for _, user in classes):
        return dict(policy.decide(now, states, cluster))
    grants: dict[str, Grant] = {}
    left = cluster.num_gpus
    for (_, user), members in sorted(classes.items(), key=lambda item: (item[0][0], not item[0][1], item[0][1])):
        limit = min(left, quotas[user]) if user else left
        fitting = _that_fit(members, limit)
        if fitting:
            part = Cluster(limit, cluster.gpus_per_node)
            decided = policy.decide(now, fitting, part)
            grants.update(decided)
            left -= sum(len(grant.gpus) for grant in decided.values())
    return grants


def _that_fit(members: Sequence[JobState], limit: int) -> list[JobState]:
    """Jobs that can have GPUs of ``limit``, which they number from 0. Running ones that arrived last are left out if
    they hold too many together.
    """
    found, held = [], 0
    for state in sorted(members, key=lambda state: (not state.gpus, state.job.arrival_s)):
        count = len(state.gpus)
        if state.job.sizes[0] <= limit and held + count <= limit:
            found.append(dataclasses.replace(state, gpus=tuple(range(held, held + count))))
            held += count
    return found

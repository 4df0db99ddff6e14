"""Sia-like (SOSP 2023): each round the best configuration of every job by goodput, as an integer linear program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from patrickstar.ones.jobs import BatchRule, Cluster, Job, JobState, goodputs
from patrickstar.ones.policies.knapsack import Configuration, best_configurations
from patrickstar.ones.policies.placement import place_on_types
from patrickstar.ones.policies.protocol import Allocation, Grant, Memoryless, Profiling
from patrickstar.ones.pools import Candidate, StateOn, states_on_types

_LEAST_SHARE = 1e-3


class SiaLike(Memoryless):
    """Minimises the sum of ``(r_j u_j)^p`` of running jobs, with ``p < 0``, and of ``lambda`` for each waiting one.

    A configuration is a type and a number of GPUs. ``u`` is a job's goodput over the least goodput of its smallest
    size on any type. ``r = (T - R d) / (T + d)`` discounts every configuration but the present one: ``T`` is the job's
    age, ``R`` its resizes, ``d`` the seconds of one. Sizes are powers of two up to a node and then whole nodes; a job's
    size at most doubles in a round. The program is a multiple-choice knapsack with a limit for each type, which is
    solved exactly by dynamic programming in place of a solver of linear programs.

    Differences from Sia: sizes that are placed afterwards, and a round that starts at once when a job arrives or ends.
    With :attr:`Profiling.EACH_TYPE` relative speeds are known from a job's arrival, as in Sia, where that takes GPUs.
    """

    def __init__(
        self,
        power: float = -0.5,
        wait_penalty: float = 1.1,
        interval_s: float = 60.0,
        profiling: Profiling = Profiling.NONE,
    ):
        self.interval_s = interval_s
        self.profiling = profiling
        self._power = power
        self._wait_penalty = wait_penalty

    def decide(self, now: float, jobs: Sequence[JobState], cluster: Cluster) -> Allocation:
        """See :meth:`patrickstar.ones.policies.protocol.Policy.decide`."""
        return self._decide(now, [{"": state} for state in jobs], {"": cluster})

    def decide_on_types(
        self, now: float, candidates: Sequence[Candidate], state_on: StateOn, pools: Mapping[str, Cluster]
    ) -> Allocation:
        """See :meth:`patrickstar.ones.policies.protocol.TypesPolicy.decide_on_types`."""
        return self._decide(now, [states_on_types(one, state_on, pools) for one in candidates], pools)

    def _decide(
        self, now: float, jobs: Sequence[Mapping[str, JobState]], pools: Mapping[str, Cluster]
    ) -> dict[str, Grant]:
        """Grants for jobs whose states are given by type; those on other types than a job's own hold no GPUs."""
        offers = [self._offers(now, states, pools) for states in jobs]
        found = best_configurations(offers, [pool.num_gpus for pool in pools.values()])
        sizes = {
            kind: [
                (states[kind], one.num_gpus)
                for states, one in zip(jobs, found, strict=True)
                if one.num_gpus and one.kind == index
            ]
            for index, kind in enumerate(pools)
        }
        return place_on_types(sizes, pools, BatchRule.BEST_GOODPUT)

    def _offers(self, now: float, states: Mapping[str, JobState], pools: Mapping[str, Cluster]) -> list[Configuration]:
        """Configurations of a job with their values, the smaller ones first."""
        speeds = {kind: goodputs(state.job, BatchRule.BEST_GOODPUT, pools[kind]) for kind, state in states.items()}
        least = min((speeds[kind][state.job.sizes[0]] for kind, state in states.items()), default=0.0)
        current = max((len(state.gpus) for state in states.values()), default=0)
        found = [Configuration(-self._wait_penalty, 0)]
        for index, (kind, pool) in enumerate(pools.items()):
            if kind not in states:
                continue
            state = states[kind]
            for size in _sizes(state.job, pool, max(2 * current, state.job.sizes[0]), len(state.gpus)):
                share = speeds[kind][size] / least
                if size != len(state.gpus):
                    share *= _discount(now, state)
                found.append(Configuration(-(max(share, _LEAST_SHARE) ** self._power), size, index))
        return found


def _discount(now: float, state: JobState) -> float:
    """The factor of configurations that need a restart."""
    age, delay = now - state.job.arrival_s, state.job.resize_s
    if not state.has_started or not delay:
        return 1.0
    return max(age - state.num_resizes * delay, 0.0) / (age + delay)


def _sizes(job: Job, cluster: Cluster, most: int, current: int) -> list[int]:
    node = cluster.gpus_per_node
    regular = {n for n in job.sizes if n % node == 0 or (n < node and n & (n - 1) == 0)}
    allowed = {n for n in regular if n <= min(most, cluster.num_gpus)} | {job.sizes[0]} | ({current} - {0})
    return sorted(allowed)

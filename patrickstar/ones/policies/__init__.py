"""Schedulers behind one protocol, for the simulator and a real cluster.

    policy = make_policy("tiresias", seed=0)
    allocation = policy.decide(now, jobs, cluster)

The third rival in ONES' paper, a scheduler trained by reinforcement learning (DRL), is missing: neither its code nor
its trained network is published.
"""

from __future__ import annotations

from collections.abc import Callable

from patrickstar.ones.policies.fifo import Fifo
from patrickstar.ones.policies.gavel import Gavel, Objective
from patrickstar.ones.policies.ones import Ones
from patrickstar.ones.policies.ones_published import OnesPublished
from patrickstar.ones.policies.optimus import OptimusGreedy
from patrickstar.ones.policies.past import EpochRecord, History, PastJob
from patrickstar.ones.policies.pollux import PolluxLike
from patrickstar.ones.policies.progress import ProgressModel
from patrickstar.ones.policies.protocol import Allocation, Foresight, Grant, Policy, Profiling, Sizes
from patrickstar.ones.policies.sia import SiaLike
from patrickstar.ones.policies.srtf import Srtf
from patrickstar.ones.policies.tiresias import TiresiasLas

POLICIES: dict[str, Callable[[int, History], Policy]] = {
    "fifo": lambda seed, history: Fifo(),
    "srtf": lambda seed, history: Srtf(),
    "tiresias": lambda seed, history: TiresiasLas(),
    "optimus": lambda seed, history: OptimusGreedy(),
    "pollux-like": lambda seed, history: PolluxLike(),
    "sia-like": lambda seed, history: SiaLike(),
    "sia-like-profiled": lambda seed, history: SiaLike(profiling=Profiling.EACH_TYPE),
    "gavel": lambda seed, history: Gavel(),
    "gavel-total": lambda seed, history: Gavel(objective=Objective.TOTAL),
    "ones-published": lambda seed, history: OnesPublished(ProgressModel(seed, history), seed),
    "ones": lambda seed, history: Ones(history),
    "ones-true-lengths": lambda seed, history: Ones(history, Foresight.EXACT),
}
"""By name. ``ones-published`` is ONES as its authors describe it, ``ones`` our variant, and ``ones-true-lengths`` ours
with the truth in place of its estimate of remaining work. ``sia-like-profiled`` and both of ``gavel`` know a job's
relative speeds on types of GPUs from its arrival.
"""


def make_policy(name: str, seed: int = 0, history: History = ()) -> Policy:
    """Makes a scheduler; ``history`` are jobs that ended earlier.

    Raises:
        ValueError: there is no policy of that name.
    """
    if name not in POLICIES:
        raise ValueError(f"there is no policy {name!r}; choose among {', '.join(POLICIES)}")
    return POLICIES[name](seed, history)


__all__ = [
    "POLICIES",
    "Allocation",
    "EpochRecord",
    "Foresight",
    "Grant",
    "History",
    "PastJob",
    "Policy",
    "Sizes",
    "make_policy",
]

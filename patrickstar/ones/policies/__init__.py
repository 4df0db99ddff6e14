"""Schedulers behind one protocol, for the simulator and a real cluster.

    policy = make_policy("tiresias", seed=0)
    allocation = policy.decide(now, jobs, cluster)

The third rival in ONES' paper, a scheduler trained by reinforcement learning (DRL), is missing: neither its code nor
its trained network is published.
"""

from __future__ import annotations

from collections.abc import Callable

from patrickstar.ones.policies.fifo import Fifo
from patrickstar.ones.policies.ones import Ones
from patrickstar.ones.policies.ones_published import Cooldown, OnesPublished
from patrickstar.ones.policies.optimus import OptimusGreedy
from patrickstar.ones.policies.pollux import PolluxLike
from patrickstar.ones.policies.progress import HistoryRow, ProgressModel, Recipe
from patrickstar.ones.policies.protocol import Allocation, Foresight, Grant, Policy
from patrickstar.ones.policies.srtf import Srtf
from patrickstar.ones.policies.tiresias import TiresiasLas

History = tuple[HistoryRow, ...]

POLICIES: dict[str, Callable[[int, History], Policy]] = {
    "fifo": lambda seed, history: Fifo(),
    "srtf": lambda seed, history: Srtf(),
    "tiresias": lambda seed, history: TiresiasLas(),
    "optimus": lambda seed, history: OptimusGreedy(),
    "pollux-like": lambda seed, history: PolluxLike(seed),
    "ones-artifact": lambda seed, history: OnesPublished(
        ProgressModel(Recipe.AS_WRITTEN, seed, history), Cooldown.FIRST_EPOCH, seed
    ),
    "ones-published": lambda seed, history: OnesPublished(
        ProgressModel(Recipe.MENDED, seed, history), Cooldown.ONE_EPOCH, seed
    ),
    "ones": lambda seed, history: Ones(ProgressModel(Recipe.MENDED, seed, history), seed),
}
"""By name. ``ones-artifact`` is ONES with the defects of its code, ``ones-published`` the same design with cool-down
and predictor as described, ``ones`` our variant.
"""


def make_policy(name: str, seed: int = 0, history: History = ()) -> Policy:
    """Makes a scheduler; ``history`` is the predictors' initial data.

    Raises:
        ValueError: there is no policy of that name.
    """
    if name not in POLICIES:
        raise ValueError(f"there is no policy {name!r}; choose among {', '.join(POLICIES)}")
    return POLICIES[name](seed, history)


__all__ = ["POLICIES", "Allocation", "Foresight", "Grant", "HistoryRow", "Policy", "make_policy"]

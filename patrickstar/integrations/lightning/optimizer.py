"""The optimizer of ``configure_optimizers``, handed to the engine and back.

Its schedulers, however nested, keep writing into the groups of their own ``torch.optim`` object, which are the engine's
too (``move_state``, ``patrickstar/engine/optimizer_takeover.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from patrickstar import _C
from patrickstar.engine.optim import HybridOptimizer
from patrickstar.engine.optimizer_takeover import groups_of, move_state
from patrickstar.integrations.lightning.package import pl


class ConfiguredOptimizer:
    """The user's ``torch.optim.AdamW``, ``Adam`` or ``SGD``, or PatrickStar's ``Lion``, for one run.

    Raises:
        ValueError: there is none, there are several, or it is of another class.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        if any(isinstance(optimizer, pl.core.optimizer._MockOptimizer) for optimizer in optimizers):
            raise ValueError("configure_optimizers returned None; return a torch.optim.AdamW or Adam")
        if len(optimizers) != 1:
            raise ValueError(
                f"configure_optimizers returned {len(optimizers)} optimizers; an engine has one for the whole module: "
                "return one torch.optim.AdamW or Adam with several parameter groups"
            )
        self._optimizer = optimizers[0]
        self.taken = groups_of(self._optimizer)
        """Class, groups and options of the user's optimizer."""

    def hand_over(self, hybrid: HybridOptimizer) -> None:
        """Moves state and groups to ``hybrid``, made from ``taken.groups`` (``move_state``)."""
        with _C.HostAllocations():
            move_state(self._optimizer, hybrid)

    def give_back(self, hybrid: HybridOptimizer) -> torch.optim.Optimizer:
        """The user's object, with ``hybrid``'s present state; call it while the engine is open."""
        with _C.HostAllocations():
            state = hybrid.state_dict()["state"]
        params = [param for group in hybrid.param_groups for param in group["params"]]
        for index, entry in state.items():
            self._optimizer.state[params[index]] = entry
        return self._optimizer

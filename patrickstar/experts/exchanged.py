"""Experts of transformers' registry whose forward exchanges tokens with other ranks."""

from __future__ import annotations

import torch
from torch import nn

from patrickstar.experts.exchange import Exchanging, parallel_experts
from patrickstar.module.adapters import is_adapted
from patrickstar.module.fused_experts import ChosenImplementations, is_experts

_IMPLEMENTATION = "patrickstar_expert_parallel"
_RANKS = "_patrickstar_expert_ranks"
_PROJECTIONS = ("gate_up_proj", "up_proj", "gate_proj", "down_proj")


class ExchangedExperts:
    """Experts whose forward exchanges tokens with other ranks."""

    def __init__(self, ranks: Exchanging):
        self._ranks = ranks
        self._chosen = ChosenImplementations(_IMPLEMENTATION, _experts_forward)
        self.modules: list[nn.Module] = []

    def add(self, experts: nn.Module) -> None:
        """Changes the forward of a module, whose parameters are this rank's when it is called."""
        self._chosen.choose(experts)
        vars(experts)[_RANKS] = self._ranks
        self.modules.append(experts)

    def restore(self) -> None:
        """Restores all forwards."""
        self._chosen.restore()
        for experts in self.modules:
            vars(experts).pop(_RANKS, None)


def find_experts(module: nn.Module, size: int) -> dict[str, nn.Module]:
    """The experts of ``module`` that ``size`` ranks can divide, by name.

    Raises:
        ValueError: there are none, or some cannot be divided.
    """
    has_registry = ChosenImplementations.registry() is not None
    found = {name: child for name, child in module.named_modules() if has_registry and is_experts(child)}
    if not found:
        raise ValueError(
            f"expert_parallel.size is {size}, but {type(module).__name__} has no experts that transformers computes by "
            "its registry of implementations; leave expert_parallel out"
        )
    for name, experts in found.items():
        if experts.num_experts % size:
            raise ValueError(
                f"expert_parallel.size is {size}, which does not divide the {experts.num_experts} experts of {name}; "
                "give a number that does"
            )
        if any(is_adapted(child) and experts in child.modules() for child in module.modules()) or any(
            is_adapted(child) for child in experts.modules()
        ):
            raise ValueError(
                f"{name} has adapters, which cannot be divided among ranks yet; leave expert_parallel out, or give no "
                "experts in target_parameters"
            )
    return found


def expert_params(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters whose first dimension counts experts, by their names in ``experts``."""
    held = experts._parameters.items()
    return {name: p for name, p in held if p is not None and name.removesuffix("_bias") in _PROJECTIONS}


def _experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Implementation for transformers' registry."""
    return parallel_experts(self, vars(self)[_RANKS], hidden_states, top_k_index, top_k_weights)

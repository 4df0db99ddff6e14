"""Expert parallelism of an engine (`expert_parallel` in the configuration).

Experts of transformers' registry keep their parameters, of which an engine has this rank's part
(``module/param_ranks.py``). Their forward exchanges tokens with the other ranks (``expert_exchange.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.choices import MatrixMode
from patrickstar.module.adapters import is_adapted
from patrickstar.module.chunked_parameter import ChunkedParameter, whole_shape
from patrickstar.module.fused_experts import ChosenImplementations, is_experts
from patrickstar.module.param_ranks import RankPart, keep_part
from patrickstar.module.preprocess import SortedParams
from patrickstar.parallel.calls import Calls, ModuleCall, OwnCalls
from patrickstar.parallel.expert_exchange import ExpertRanks, parallel_experts
from patrickstar.ranks.distributed import RankGroups
from patrickstar.ranks.mesh import Axis, MeshRanks

_IMPLEMENTATION = "patrickstar_expert_parallel"
_RANKS = "_patrickstar_expert_ranks"
_PROJECTIONS = ("gate_up_proj", "up_proj", "gate_proj", "down_proj")


class ExchangedExperts:
    """Experts whose forward exchanges tokens with other ranks."""

    def __init__(self, ranks: ExpertRanks):
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


class ShardedExperts:
    """The experts of a module, divided among neighbouring ranks. Implements ``Matrices``."""

    names = None
    reason = ""

    def __init__(self, mesh: MeshRanks, size: int):
        """Collective over all ranks. ``size``: number of ranks that divide the experts."""
        self._world = mesh.world_group
        neighbours, _ = mesh.along(Axis.DATA).divide(size)
        self._ranks = ExpertRanks(neighbours)
        self._exchanged = ExchangedExperts(self._ranks)
        self._handles: list[Any] = []
        self.shown = f"experts divided among {size} ranks"

    def mode_for(self, module: nn.Module) -> MatrixMode:
        """A value without effect: no matrix is sharded."""
        return MatrixMode.TWO

    def divide(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Marks this rank's part of each expert's parameters, which stay whole until they move into chunks.

        Raises:
            ValueError: the module has no experts that can be divided, or their number is not divisible.
        """
        part = RankPart(self._ranks.index, self._ranks.size, self._ranks.gather)
        for experts in find_experts(module, self._ranks.size).values():
            self._exchanged.add(experts)
            for param in expert_params(experts).values():
                keep_part(param, part)
            self._handles.append(experts.register_load_state_dict_pre_hook(_take_parts))
        return {}

    def check_same_values(self) -> None:
        """Does nothing: the first rank's values are sent to all."""

    def num_elements(self, params: Iterable[nn.Parameter]) -> int:
        """See ``Matrices``."""
        return sum(whole_shape(param).numel() for param in params)

    def left_out(self, params: SortedParams) -> list[int]:
        """An empty list: each part counts once in the norm."""
        return []

    def total(self, squares: float) -> float:
        """Returns ``squares``, which are of all ranks' chunks."""
        return squares

    def calls(self, meet: Callable[[], object]) -> Calls:
        """Calls that all ranks make together, each with its own samples."""
        self._ranks.meet = meet
        return JointCalls(self._world)

    def close(self) -> None:
        """Restores the experts' forward. Called after the parameters became whole."""
        self._exchanged.restore()
        for handle in self._handles:
            handle.remove()
        for experts in self._exchanged.modules:
            for param in expert_params(experts).values():
                keep_part(param, None)


class JointCalls(OwnCalls):
    """Calls of the module that all ranks make together, since each waits for the others' tokens.

    Raises:
        RankMismatch: another rank is in another call.
    """

    repeats_forwards = False

    def __init__(self, ranks: RankGroups):
        self._ranks = ranks
        self._is_inside = False

    @contextlib.contextmanager
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[ModuleCall]:
        """One call; calls within it are part of it."""
        if self._is_inside:
            yield ModuleCall(args, kwargs)
            return
        self._ranks.control.exchange(b"", "a call of the module whose experts they divide")
        self._is_inside = True
        try:
            yield ModuleCall(args, kwargs)
        finally:
            self._is_inside = False


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


def _take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Replaces whole values in ``state_dict`` by this rank's parts."""
    for name, param in expert_params(module).items():
        value = state_dict.get(prefix + name)
        if isinstance(param, ChunkedParameter) and isinstance(value, torch.Tensor):
            handle = param._patrickstar
            if value.shape == handle.whole_shape:
                state_dict[prefix + name] = handle.own(value)

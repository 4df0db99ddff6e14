"""Expert parallelism of an engine (`expert_parallel` in the configuration).

Experts of transformers' registry keep their parameters, of which an engine has this rank's part
(``module/param_ranks.py``). Their forward exchanges tokens with the other ranks (``patrickstar/experts``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.choices import MatrixMode
from patrickstar.experts.exchange import ExpertRanks
from patrickstar.experts.exchanged import ExchangedExperts, expert_params, find_experts
from patrickstar.module.chunked_parameter import ChunkedParameter, whole_shape
from patrickstar.module.param_ranks import RankPart, keep_part
from patrickstar.module.preprocess import SortedParams
from patrickstar.parallel.calls import Calls, ModuleCall, OwnCalls
from patrickstar.ranks.distributed import RankGroups
from patrickstar.ranks.mesh import Axis, MeshRanks


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

    def undo(self) -> None:
        """See ``Matrices``."""
        self.close()

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


def _take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Replaces whole values in ``state_dict`` by this rank's parts."""
    for name, param in expert_params(module).items():
        value = state_dict.get(prefix + name)
        if isinstance(param, ChunkedParameter) and isinstance(value, torch.Tensor):
            handle = param._patrickstar
            if value.shape == handle.whole_shape:
                state_dict[prefix + name] = handle.own(value)

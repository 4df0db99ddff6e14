"""Sequence and context parallelism of an engine (`sequence_parallel` in the configuration)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.config import Config, SequenceMode
from patrickstar.parallel.calls import ModuleCall, OwnCalls, check_same_batch
from patrickstar.ranks.distributed import RankGroups
from patrickstar.ranks.mesh import Axis, MeshRanks
from patrickstar.ranks.messages import reading
from patrickstar.sequence.division import Division, WholeTokens
from patrickstar.sequence.group import HybridGroup, SequenceGroup
from patrickstar.sequence.hugging_face import ShardedModel, find_model
from patrickstar.sequence.layout import Mode
from patrickstar.sequence.survey import Survey

_SEEDS_OF_A_BLOCK = 2**32
"""Ranks with other samples or heads use other seeds for dropout in attention."""


class ShardedSequences:
    """Shards the sequences of each call.

    A Hugging Face model is called with whole sequences, the same on all ranks that share them, and computes this rank's
    tokens (``sequence/hugging_face.py``). Any other module receives its inputs unchanged and computes attention with
    :func:`patrickstar.sequence.attention` and the engine's ``sequence_group``.

    Gradients: each rank that shares a sequence has a part of the loss, so their gradients are summed. Gradients of
    different data are averaged. Chunks hold the mean over all ranks; readers multiply it by the ranks of a sequence
    (``StepGradients.chunk_factor``).

    With tensor parallelism all ranks of a mesh are called with the same batch. First the mesh's rows take their
    samples, then the ranks of a sequence take their tokens. Targets are counted before, since the loss is divided by
    their number in the whole batch. Attention of a rank's heads communicates along the sequence axis, between ranks
    with the same blocks.

    Args:
        module: the user's.
        config: of the engine.
        mesh: its ranks.
        meet: ``Runtime.meet_ranks``.
        num_steps: returns the optimizer steps so far. Dropout in attention follows from it and from the first rank's
            seed, so a resumed run continues with the same dropout.
        blocks: the calls that tensor parallelism needs.
        survey: findings about a Hugging Face model.

    Raises:
        ValueError: the module's sequences cannot be sharded.
    """

    repeats_forwards = False

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        mesh: MeshRanks,
        meet: Callable[[], object],
        num_steps: Callable[[], int],
        blocks: OwnCalls,
        survey: Survey,
    ):
        section, ranks = config.sequence_parallel, mesh.along(Axis.SEQUENCE)
        mode = None if section.mode is SequenceMode.AUTO else Mode(section.mode.value)
        self.sequence_group: SequenceGroup | HybridGroup
        if mode is Mode.HYBRID:
            self.sequence_group = HybridGroup.of_ranks(ranks, _neighbours(config, ranks.context.local_world_size), meet)
        else:
            self.sequence_group = SequenceGroup.of_ranks(ranks, meet)
        self._ranks = mesh.world_group
        self._division_of_ranks = [
            tuple(self._ranks.members[rank] for rank in part)
            for part in mesh.mesh.division(Axis.SEQUENCE, Axis.ROWS, Axis.COLUMNS)
        ]
        self._blocks = blocks
        self._shared = "share sequences" if blocks.ranks_per_call == 1 else "share sequences and matrices"
        seeds = _Seeds(_first_ranks_seed(mesh.world_group) + _SEEDS_OF_A_BLOCK * _block(mesh), num_steps)
        model = find_model(module)
        self.ranks_per_call = 1 if model is None else section.size * blocks.ranks_per_call
        self._model: ShardedModel | None = None
        self._names: list[str] = []
        if model is None and blocks.ranks_per_call > 1:
            raise ValueError(
                f"{type(module).__name__} is no model of Hugging Face, whose sequences alone are divided beside its "
                "matrices; leave sequence_parallel or tensor_parallel out"
            )
        if model is not None:
            _check_is_all(model, module)
            self._model = ShardedModel(
                model, self.sequence_group, mode, seeds.next, ranks.context.device, mesh.mesh.columns, survey
            )
            self._names = list(inspect.signature(module.forward).parameters)
        self._division: Division | None = None
        self._is_inside = False

    @contextlib.contextmanager
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[ModuleCall]:
        """Wraps one call with this rank's part of it. Nested calls pass unchanged."""
        if self._model is None or self._is_inside:
            yield ModuleCall(args, kwargs)
            return
        self._is_inside = True
        try:
            named = {**dict(zip(self._names, args, strict=False)), **kwargs}
            if self._model.divides(named):
                tokens = named["input_ids"] if named.get("input_ids") is not None else named["inputs_embeds"]
                check_same_batch(self._ranks, self._division_of_ranks, tokens, self._shared)
                model = self._model
                samples = self._blocks.part((), model.with_target_count(named), len(tokens))
                mine = model.divide(samples.kwargs)
                self._division = mine.division
                with model.running(mine):
                    yield ModuleCall((), mine.kwargs, lambda output: samples.result(model.combine(output, mine)))
            else:
                with self._model.whole_call(), self._blocks.call(args, kwargs) as call:
                    yield call
        finally:
            self._is_inside = False

    def gather_tokens(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """See ``Engine.gather_tokens``."""
        if self._division is None:
            raise _C.StateError("tokens of all ranks were asked for before the first call of the model; call it first")
        if tensor.shape[dim] != self._division.local_length:
            raise ValueError(
                f"dimension {dim} of the tensor {list(tensor.shape)} has {tensor.shape[dim]} elements, but this rank "
                f"has {self._division.local_length} tokens of the last call; give an output of that call"
            )
        return WholeTokens.apply(tensor, self.sequence_group, self._division, dim)

    def close(self) -> None:
        """Restores the model's attention."""
        if self._model is not None:
            self._model.restore()


class _Seeds:
    """One seed per call, from the step and the number of calls in it."""

    def __init__(self, first: int, num_steps: Callable[[], int]):
        self._first = first
        self._num_steps = num_steps
        self._last = (-1, 0)

    def next(self) -> int:
        step, calls = self._last
        now = self._num_steps()
        self._last = (now, calls + 1 if step == now else 0)
        return (self._first + self._last[0] * 2**10 + self._last[1]) % 2**40


def _block(mesh: MeshRanks) -> int:
    """Index of this rank's block of each matrix."""
    here = mesh.coordinates
    return here[Axis.ROWS] * mesh.mesh.columns + here[Axis.COLUMNS]


def _first_ranks_seed(ranks: RankGroups) -> int:
    seeds = ranks.control.exchange(str(torch.initial_seed() % 2**40).encode(), "the seed of dropout in attention")
    with reading("the seed of dropout in attention"):
        return int(seeds[0])


def _check_is_all(model: nn.Module, module: nn.Module) -> None:
    """Raises ValueError if ``module`` has parameters outside ``model``: calls of other parts would not be sharded."""
    if set(model.parameters()) != set(module.parameters()):
        raise ValueError(
            f"{type(module).__name__} has parameters beside those of its {type(model).__name__}, whose sequences were "
            "to be divided; put them into one model of Hugging Face, or compute attention with "
            "patrickstar.sequence.attention"
        )


def _neighbours(config: Config, num_local_ranks: int) -> int:
    section = config.sequence_parallel
    if section.ulysses_size is not None:
        return section.ulysses_size
    return next(number for number in range(min(num_local_ranks, section.size), 0, -1) if section.size % number == 0)

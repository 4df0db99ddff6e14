"""Calls with the same whole batch on all ranks that share matrices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from patrickstar.parallel.calls import ModuleCall, OwnCalls, check_same_batch
from patrickstar.ranks.mesh import Axis, MeshRanks
from patrickstar.tensor2d import MeshGroup, divide_activation, divide_batch

_NO_BATCH = ("cache_position", "inputs_embeds")
"""Arguments whose first dimension is not the batch, or that are sharded differently."""


class SharedCalls(OwnCalls):
    """Calls in which the model itself takes this rank's part. The loss is that of the whole batch."""

    repeats_forwards = False

    def __init__(self, mesh: MeshRanks):
        self._ranks = mesh.world_group
        self._sharing = [
            tuple(self._ranks.members[rank] for rank in part) for part in mesh.mesh.division(Axis.ROWS, Axis.COLUMNS)
        ]
        self.ranks_per_call = len(self._sharing[0])
        self._is_inside = False

    @contextlib.contextmanager
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[ModuleCall]:
        """Wraps one call; checks that all ranks have the same batch. Nested calls pass unchanged."""
        tokens = None if self._is_inside else _tokens_of(args, kwargs)
        if tokens is None:
            yield ModuleCall(args, kwargs)
            return
        check_same_batch(self._ranks, self._sharing, tokens, "share matrices")
        self._is_inside = True
        try:
            yield self.part(args, kwargs, len(tokens))
        finally:
            self._is_inside = False


class RowCalls(SharedCalls):
    """Calls in which each row of the mesh computes its samples [b/r, ...].

    With autograd, outputs beside the loss are this rank's blocks. Without autograd, logits are those of the whole
    batch.
    """

    def __init__(self, mesh: MeshRanks, group: MeshGroup):
        super().__init__(mesh)
        self._group = group

    def part(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> ModuleCall:
        """The samples of this rank's row."""
        mine = [self._samples("", value, batch) for value in args]
        named = {name: self._samples(name, value, batch) for name, value in kwargs.items()}
        return ModuleCall(tuple(mine), named, self._whole_logits)

    def _samples(self, name: str, value: Any, batch: int) -> Any:
        if isinstance(value, torch.Tensor) and name == "inputs_embeds":
            return divide_activation(value, self._group.place)
        is_batch = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == batch
        return divide_batch(value, self._group.place) if is_batch and name not in _NO_BATCH else value

    def _whole_logits(self, output: Any) -> Any:
        rows = self._group.along_rows
        logits = getattr(output, "logits", None)
        if not torch.is_grad_enabled() and rows.size > 1 and isinstance(logits, torch.Tensor):
            output.logits = torch.cat(rows.gather(logits))
        return output


def _tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The argument whose first dimension is the batch size."""
    named = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args, *kwargs.values()]
    return next((value for value in named if isinstance(value, torch.Tensor) and value.dim() > 0), None)

"""Mixtures of experts on a mesh: routers and experts are whole on each rank, and each rank computes some tokens.

Columns, which have other features of the same tokens, exchange them for whole features of some tokens: [t, h/c] to
[t/c, h] and back. Gradients are summed over all ranks. Parameters take the memory of a model that is not sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from patrickstar.tensor2d.division import Placement, Split
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.layer import Layer2D, Source
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.panels import PartialSums, sum_dtype


class WholeMixture(Layer2D):
    """A token-wise module whose parameters each rank has whole: [b/r, s, h/c] -> [b/r, s, h/c].

    Args:
        module: takes and returns [1, tokens, h]; of a tuple, the first output. Its parameters stay.
        name: its name in the model.
        group: the mesh.
    """

    is_one_use = True
    """An engine's hooks treat it as one use of all parameters in it, since it calls ``module`` with other tensors."""

    def __init__(self, module: nn.Module, name: str, group: MeshGroup):
        super().__init__(group)
        self.module = module
        for key, param in module.named_parameters():
            shape = tuple(param.shape)
            self.placements[f"module.{key}"] = Placement(Split.WHOLE)
            self.sources[f"module.{key}"] = Source((f"{name}.{key}",), shape[:1], (shape,))

    def forward(self, hidden: torch.Tensor) -> Any:
        """The module's output of all tokens."""
        params = dict(self.module.named_parameters())
        if self.group.world_group.size > 1:
            values = _SummedApart.apply(self.group.world_group, *params.values())
            params = dict(zip(params, values, strict=True))
        line, tokens = self.group.along_columns, hidden.flatten(0, -2)
        missing = -len(tokens) % line.size
        mine = _ForTokens.apply(nn.functional.pad(tokens, (0, 0, 0, missing)), line) if line.size > 1 else tokens
        output = functional_call(self.module, params, (mine[None],))
        first = output[0] if isinstance(output, tuple) else output
        found = _ForFeatures.apply(first.flatten(0, -2), line) if line.size > 1 else first
        found = found.reshape(-1, hidden.shape[-1])[: len(tokens)].view(hidden.shape)
        return (found, *output[1:]) if isinstance(output, tuple) else found


class _SummedApart(torch.autograd.Function):
    """Replicated parameters whose gradients are summed over ranks, one parameter after another: as in
    :func:`~patrickstar.tensor2d.sums.replicated`, with memory for one sum.
    """

    @staticmethod
    def forward(ctx: Any, line: Line, *params: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.line = line
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):  # type: ignore[override]
        needed = ctx.needs_input_grad[1:]
        return None, *(
            _sum(grad, ctx.line) if is_needed else None for grad, is_needed in zip(grads, needed, strict=True)
        )


def _sum(grad: torch.Tensor, line: Line) -> torch.Tensor:
    """Reduce-scatter and all-gather; the same bits on all ranks."""
    flat = grad.flatten()
    parts = nn.functional.pad(flat, (0, -len(flat) % line.size)).view(line.size, -1)
    sums = PartialSums(torch.empty_like(parts[:1]), 0, line.size, line)
    for index in range(line.size):
        part = parts[index : index + 1]
        sums.add(index, part.to(sum_dtype(part.dtype)) if sums.keeps(index) else part)
    return torch.cat(line.gather(sums.finish())).flatten()[: len(flat)].view_as(grad)


class _ForTokens(torch.autograd.Function):
    """[t, h/c] of all tokens to [t/c, h] of some; columns divide t."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, line: Line) -> torch.Tensor:
        ctx.line = line
        return _whole_features(hidden, line)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        return _all_tokens(grad, ctx.line), None


class _ForFeatures(torch.autograd.Function):
    """The inverse of :class:`_ForTokens`."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, line: Line) -> torch.Tensor:
        ctx.line = line
        return _all_tokens(hidden, line)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        return _whole_features(grad, ctx.line), None


def _whole_features(hidden: torch.Tensor, line: Line) -> torch.Tensor:
    return torch.cat(_exchanged(hidden.chunk(line.size), line), dim=1)


def _all_tokens(hidden: torch.Tensor, line: Line) -> torch.Tensor:
    return torch.cat(_exchanged(hidden.chunk(line.size, dim=1), line))


def _exchanged(parts: tuple[torch.Tensor, ...], line: Line) -> list[torch.Tensor]:
    """Sends part i to rank i; the parts for this rank, by rank."""
    others = [rank for rank in range(line.size) if rank != line.rank]
    outgoing = {rank: parts[rank].contiguous() for rank in others}
    incoming = {rank: torch.empty_like(outgoing[rank]) for rank in others}
    line.swap(outgoing, incoming)
    return [incoming.get(rank, parts[line.rank]) for rank in range(line.size)]

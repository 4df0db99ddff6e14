"""Checkpoints of a tensor-parallel engine: each rank saves its blocks, and any mesh loads full tensors.

Saved tensors have the names of blocks (``checkpoint/blocks.py``). Groups, counts and loaded tensors have the names
before sharding. So checkpoints move between meshes, and to and from unsharded models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.checkpoint.blocks import BlockedParameter, Held, block_name, describe_blocks
from patrickstar.checkpoint.shards import Kind, TensorRange
from patrickstar.module.compiled.dynamo import without_wrappers
from patrickstar.parallel.sharded_values import ShardedNames, ShardedPart
from patrickstar.session.session import Session
from patrickstar.state.engine_shards import EngineSink, has_states, kind_of, named_params, state_kinds
from patrickstar.state.parts import Part


def stored_params(session: Session) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that this rank's chunk group saves, with their names in the checkpoint."""
    names = session.matrices.names
    if names is None:
        yield from named_params(session.module)
        return
    for part in names.parts:
        place = part.layer.group.place
        if (place.row, place.column) in _held(part).places((place.rows, place.columns)):
            yield block_name(part.name, place.row, place.column), part.param


def whole_names(session: Session) -> dict[nn.Parameter, tuple[str, ...]]:
    """Names in a checkpoint of the full parameters behind each parameter."""
    names = session.matrices.names
    if names is None:
        return {param: (name,) for name, param in named_params(session.module)}
    return {part.param: part.sources for part in names.parts}


def further_names(session: Session) -> dict[str, str]:
    """Further names of tied parameters; each maps to the name in a checkpoint."""
    names = session.matrices.names
    if names is not None:
        return dict(names.tied)
    first = {param: name for name, param in named_params(session.module)}
    every = session.module.named_parameters(remove_duplicate=False)
    return {known: first[param] for name, param in every if (known := without_wrappers(name)) != first[param]}


def described_blocks(session: Session) -> dict[str, Any] | None:
    """The description of blocks for the checkpoint's state; None: not sharded."""
    names = session.matrices.names
    if names is None:
        return None
    place = names.parts[0].layer.group.place
    return describe_blocks((place.rows, place.columns), [_described(part) for part in names.parts])


def make_sink(session: Session, part: Part) -> EngineSink:
    """A sink for this rank's part of a checkpoint with full tensors."""
    names = session.matrices.names
    return EngineSink(session, part) if names is None else ShardedSink(session, part, names)


def block_sink(session: Session, part: Part, described: Any) -> EngineSink | None:
    """A sink for this rank's stored blocks, if ``described`` matches this mesh; else None."""
    names = session.matrices.names
    if names is None or described != described_blocks(session):
        return None
    params = {}
    for one in names.parts:
        place = one.layer.group.place
        params[block_name(one.name, *_held(one).stored_by(place.row, place.column))] = one.param
    return EngineSink(session, part, params)


class ShardedSink(EngineSink):
    """Receives full tensors, one parameter after another, and keeps this rank's block of each."""

    def __init__(self, session: Session, part: Part, names: ShardedNames):
        super().__init__(session, part)
        self._parts = {name: part for part in names.parts for name in part.sources}
        self._names = names
        self._taken: dict[str, torch.Tensor] = {}  # full tensors of the parameter that arrives

    def _all(self) -> Iterator[TensorRange]:
        for part in self._names.parts:
            param = part.param
            kinds: list[tuple[Kind, torch.dtype]] = [(kind_of(param), param.dtype)]
            if self._with_states and has_states(param):
                kinds += [(kind, torch.float32) for kind in state_kinds(self._session)]
            for kind, dtype in kinds:
                for name, shape in part.shapes.items():
                    size = torch.Size(shape).numel()
                    yield TensorRange(name=name, kind=kind, shape=shape, dtype=dtype, begin=0, end=size)
        yield from (item for item in super()._all() if item.kind == "buffer")

    def write(self, wanted: TensorRange, values: torch.Tensor) -> None:
        """Writes a parameter's block into the engine once its last full tensor has arrived."""
        part = self._parts.get(wanted.name)
        if part is None:
            super().write(wanted, values)
            return
        with _C.HostAllocations():
            self._taken[wanted.name] = values.view(wanted.shape).clone()
            if wanted.name != part.sources[-1]:
                return
            taken, self._taken = self._taken, {}
            block = part.block(lambda name: taken[name])
        self.write_param(part.param, wanted.kind, block)


def _held(part: ShardedPart) -> Held:
    return Held(part.placement.split.value)


def _described(part: ShardedPart) -> BlockedParameter:
    placement, source = part.placement, part.source
    return BlockedParameter(
        name=part.name,
        held=_held(part),
        parts=placement.parts,
        is_turned=placement.transposed,
        rows=part.layer.whole_rows.get(part.key) if placement.padded_to is not None else None,
        sources=part.shapes,
        has_turned_sources=source.is_transposed,
    )

"""Chunk sizes, and the layout of a model's parameters in chunks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from torch import nn

from patrickstar import _C
from patrickstar.machine.state_scheme import StateScheme
from patrickstar.module.preprocess import DTYPES, SortedParams

_LEAST_CHUNK_NUMEL = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkSize:
    """The chunk size in elements, and the device budget from which the default applies."""

    numel: int
    ample_bytes: int
    """A device budget of at least this gets the default size."""
    ample_extra_bytes: int
    """Additional memory that the default size may need at any time."""


def working_sets(params: SortedParams, module: nn.Module) -> Callable[[int], int]:
    """A function of the chunk size that returns the device bytes of the largest module's chunks."""
    owned = owned_params(params, module)
    return functools.cache(lambda numel: _C.working_set_bytes(make_layout(params, numel), owned))


def choose_chunk_size(
    params: SortedParams, working_set_bytes: Callable[[int], int], default_numel: int, device_bytes: int
) -> ChunkSize:
    """The default size on an ample device. On a scarce one, the largest power-of-two fraction for which the largest
    module's chunks take least memory (within 5 %).

    Results do not depend on it. On a scarce device the choice depends on the model alone, so the least budget that a
    warm-up step measures holds for the next run.

    Args:
        params: of the model.
        working_set_bytes: of the model, by chunk size (:func:`working_sets`).
        default_numel: the chunk size on an ample device.
        device_bytes: the budget.
    """
    num_bytes = sum(spec.shape.numel() * spec.compute_dtype.itemsize for spec in params.chunked)
    ample_bytes = 16 * num_bytes
    extra_bytes = 2 * num_bytes  # all compute copies and all gradients
    if device_bytes >= ample_bytes:
        return ChunkSize(numel=default_numel, ample_bytes=ample_bytes, ample_extra_bytes=extra_bytes)
    sizes = [default_numel]
    while sizes[-1] >= 2 * _LEAST_CHUNK_NUMEL:
        sizes.append(sizes[-1] // 2)
    needs = {numel: working_set_bytes(numel) for numel in sizes}
    numel = next(numel for numel in sizes if needs[numel] <= 1.05 * min(needs.values()))
    return ChunkSize(numel=numel, ample_bytes=ample_bytes, ample_extra_bytes=extra_bytes)


def owned_params(params: SortedParams, module: nn.Module) -> list[list[int]]:
    """For each module inside ``module``, the chunked parameters that it owns, as indices into ``params.chunked``."""
    ids = {spec.param: index for index, spec in enumerate(params.chunked)}
    return [[ids[p] for p in child._parameters.values() if p is not None and p in ids] for child in module.modules()]


def make_layout(
    params: SortedParams,
    chunk_numel: int,
    num_ranks: int = 1,
    rank: int = 0,
    scheme: StateScheme | None = None,
) -> _C.Layout:
    """Packs the chunked parameters in registration order. Chunks that ranks share are cut into ``num_ranks`` shards.
    ``scheme`` is the format of the optimizer states; None: float32.
    """
    format_of = functools.cache((scheme or StateScheme()).format_of)
    return _C.Layout.pack(
        numels=[spec.shape.numel() for spec in params.chunked],
        dtypes=[DTYPES[spec.compute_dtype] for spec in params.chunked],
        trainable=[spec.trained for spec in params.chunked],
        chunk_numel=chunk_numel,
        num_ranks=num_ranks,
        rank=rank,
        states=[format_of(spec.compute_dtype, keeps_float32=spec.keeps_float32) for spec in params.chunked],
        quantization=[spec.quantization for spec in params.chunked],
        ranks=[
            _C.ChunkRanks.of_parts(spec.part.count if spec.part and num_ranks > 1 else 1) for spec in params.chunked
        ],
    )

"""Float32 masters of 16-bit parameters whose values were read and then overwritten.

[Note: put back] A torch function reads the 16-bit value of a parameter, but writes its float32 master. Consider code
that reads values, writes others (averaged weights for an evaluation, a perturbation) and writes the first ones back.
Every master would be rounded, and updates smaller than a 16-bit step would be lost. So an element gets its master back
if the written value is bit for bit what a read of that master gives. Candidates are the master in the chunk and the
master at the user's last read. The latter is kept from the first write after that read until the next update of
parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from patrickstar import _C
from patrickstar.module.param_handle import ParamHandle

_PIECE_NUMEL = 1 << 22


class OverwrittenMasters:
    """Keeps masters of one engine's parameters: 4 bytes of host memory per element of this rank's shard that was read
    and then overwritten.
    """

    def __init__(self, uses: _C.UseObserver):
        self._uses = uses
        self._kept: dict[int, torch.Tensor] = {}
        self._exact: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def exactly(self, handles: Iterable[ParamHandle]) -> Iterator[None]:
        """Context in which values written to these parameters become their masters exactly."""
        self._exact = frozenset(handle.id for handle in handles)
        try:
            yield
        finally:
            self._exact = frozenset()

    def keep(self, handle: ParamHandle, masters: torch.Tensor) -> None:
        """Keeps a copy of ``masters``, which are about to be overwritten, if the user has read them."""
        if _has_master(handle) and self._uses.was_read(handle.id) and handle.id not in self._kept:
            with _C.HostAllocations():
                self._kept[handle.id] = _share(handle, masters).clone()

    @torch.no_grad()
    def put_back(self, handle: ParamHandle, masters: torch.Tensor, values: torch.Tensor) -> None:
        """Replaces elements of ``values`` by the masters that a read rounds to them; ``values`` is about to replace
        ``masters``. All are float32 CPU tensors with the parameter's shape and strides.
        """
        if not _has_master(handle) or not self._uses.was_read(handle.id) or handle.id in self._exact:
            return
        with _C.HostAllocations(), torch._C.DisableTorchFunctionSubclass():
            values = _share(handle, values)
            for known in (_share(handle, masters), self._kept.get(handle.id)):
                if known is not None:
                    _replace_rounded(values, known, _dtypes_of_reads(handle))

    def forget(self) -> None:
        """Drops all kept masters after an update of parameters."""
        self._kept.clear()
        self._uses.forget_reads()


def _has_master(handle: ParamHandle) -> bool:
    return handle.trainable and handle.dtype.itemsize < 4


def _dtypes_of_reads(handle: ParamHandle) -> set[torch.dtype]:
    """Dtypes of a read: torch functions give the compute dtype, ``state_dict`` the user's dtype."""
    return {dtype for dtype in (handle.dtype, handle.original_dtype) if dtype.itemsize < 4}


def _share(handle: ParamHandle, values: torch.Tensor) -> torch.Tensor:
    """A flat view of this rank's shard of the elements; a rank writes no others."""
    return values.as_strided((values.numel(),), (1,))[handle.share]


def _replace_rounded(values: torch.Tensor, masters: torch.Tensor, dtypes: set[torch.dtype]) -> None:
    for value, master in zip(values.split(_PIECE_NUMEL), masters.split(_PIECE_NUMEL), strict=True):
        given = value.view(torch.int32).clone()
        for dtype in dtypes:
            is_read = given == master.to(dtype).float().view(torch.int32)
            value.copy_(torch.where(is_read, master, value))

"""Float32 masters of 16-bit parameters whose values were read and then overwritten.

[Note: put back] A torch function reads the 16-bit value of a parameter and writes its float32 master. Code that reads
values, writes others (averaged weights for an evaluation, a perturbation) and puts the first ones back would round
every master, and updates below a 16-bit step would be lost. So an element gets its master back where the value that is
copied to it is, bit for bit, what a read of that master gives. A master is looked for in two places: in the chunk, and
among those that were in the chunk when the user last read the parameter. The latter are kept from the first write after
such a read to the next update of parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from patrickstar import _C
from patrickstar.module.chunked_parameter import ParamHandle

_PIECE_NUMEL = 1 << 22


class OverwrittenMasters:
    """Keeps masters of one engine's parameters. Takes 4 bytes of host memory for each element of this rank's share
    that was read and then overwritten.
    """

    def __init__(self, uses: _C.UseObserver):
        self._uses = uses
        self._kept: dict[int, torch.Tensor] = {}
        self._exact: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def exactly(self, handles: Iterable[ParamHandle]) -> Iterator[None]:
        """Within, values that are written to these parameters become their masters as they are."""
        self._exact = frozenset(handle.id for handle in handles)
        try:
            yield
        finally:
            self._exact = frozenset()

    def keep(self, handle: ParamHandle, masters: torch.Tensor) -> None:
        """``masters``, the parameter's float32 values, are about to be overwritten. They are kept where they are the
        ones that the user has read.
        """
        if _has_master(handle) and self._uses.was_read(handle.id) and handle.id not in self._kept:
            with _C.HostAllocations():
                self._kept[handle.id] = _share(handle, masters).clone()

    @torch.no_grad()
    def put_back(self, handle: ParamHandle, masters: torch.Tensor, values: torch.Tensor) -> None:
        """Replaces elements of ``values``, which are to take the place of ``masters``, by the masters that a read has
        rounded to them. All are float32 tensors on the CPU with the parameter's shape and strides.
        """
        if not _has_master(handle) or not self._uses.was_read(handle.id) or handle.id in self._exact:
            return
        with _C.HostAllocations(), torch._C.DisableTorchFunctionSubclass():
            values = _share(handle, values)
            for known in (_share(handle, masters), self._kept.get(handle.id)):
                if known is not None:
                    _replace_rounded(values, known, _dtypes_of_reads(handle))

    def forget(self) -> None:
        """Parameters were updated: what was read before is no present value."""
        self._kept.clear()
        self._uses.forget_reads()


def _has_master(handle: ParamHandle) -> bool:
    return handle.trainable and handle.dtype.itemsize < 4


def _dtypes_of_reads(handle: ParamHandle) -> set[torch.dtype]:
    """A torch function gives the compute dtype, ``state_dict`` the dtype that the user's module has."""
    return {dtype for dtype in (handle.dtype, handle.original_dtype) if dtype.itemsize < 4}


def _share(handle: ParamHandle, values: torch.Tensor) -> torch.Tensor:
    """This rank's share of the elements, which alone it writes; flat, with the same memory."""
    return values.as_strided((values.numel(),), (1,))[handle.share]


def _replace_rounded(values: torch.Tensor, masters: torch.Tensor, dtypes: set[torch.dtype]) -> None:
    for value, master in zip(values.split(_PIECE_NUMEL), masters.split(_PIECE_NUMEL), strict=True):
        given = value.view(torch.int32).clone()
        for dtype in dtypes:
            is_read = given == master.to(dtype).float().view(torch.int32)
            value.copy_(torch.where(is_read, master, value))

"""What DeepSpeed's stage 3 writes on parameters, for scripts that look for it: ``ds_id``, ``ds_shape`` and so on."""

from __future__ import annotations

import enum

import torch

from patrickstar.engine.session import Session
from patrickstar.module.chunked_parameter import ChunkedParameter

_NAMES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor")


class ZeroParamStatus(enum.Enum):
    """Where a parameter's values are; of ``param.ds_status``, which is always AVAILABLE here."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def put_attributes(session: Session) -> None:
    """Writes on each parameter in a chunk:

    ``ds_id``: its place among them. ``ds_shape``, ``ds_numel``: its own, which ``shape`` and ``numel()`` are too.
    ``ds_status``: always AVAILABLE, since any use of a parameter brings its values in. ``ds_tensor``: a tensor on the
    meta device of as many elements as this rank keeps; ``safe_get_local_fp32_param`` has their values.
    """
    for param in session.module.parameters():
        if isinstance(param, ChunkedParameter):
            handle = param._patrickstar
            numel = session.layout.shard_of(handle.id)[1]
            values = (
                handle.id,
                handle.shape,
                handle.shape.numel(),
                ZeroParamStatus.AVAILABLE,
                torch.empty(numel, dtype=param.dtype, device="meta"),
            )
            vars(param).update(zip(_NAMES, values, strict=True))


def take_attributes(session: Session) -> None:
    """Removes what :func:`put_attributes` has written on the parameters."""
    for param in session.module.parameters():
        for name in _NAMES:
            vars(param).pop(name, None)

"""Attributes of DeepSpeed's stage 3 on parameters, for scripts that read them: ``ds_id``, ``ds_shape`` and so on."""

from __future__ import annotations

import enum

import torch

from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.session.session import Session

_NAMES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor")


class ZeroParamStatus(enum.Enum):
    """State of a parameter's values in ``param.ds_status``; always AVAILABLE here."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def put_attributes(session: Session) -> None:
    """Sets attributes on each chunked parameter.

    * ``ds_id``: its index among them.
    * ``ds_shape``, ``ds_numel``: equal to ``shape`` and ``numel()``.
    * ``ds_status``: always AVAILABLE, since any use of a parameter fetches its values.
    * ``ds_tensor``: a meta tensor with as many elements as this rank keeps; ``safe_get_local_fp32_param`` returns their
      values.
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
    """Removes the attributes of :func:`put_attributes`."""
    for param in session.module.parameters():
        for name in _NAMES:
            vars(param).pop(name, None)

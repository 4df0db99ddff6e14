"""The observer of parameters on the meta device."""

from __future__ import annotations

import torch

from patrickstar import _C
from patrickstar.module.observer import Observer
from patrickstar.module.param_handle import ParamHandle


class MetaObserver(Observer):
    """Discards values written to parameters."""

    def read_values(self, handle: ParamHandle, kind: _C.ArrayKind) -> torch.Tensor:
        """Returns a meta tensor of the parameter's shape."""
        return torch.empty_strided(handle.shape, handle.stride, dtype=torch.float32, device="meta")

    def write_values(self, handle: ParamHandle, kind: _C.ArrayKind, values: torch.Tensor) -> None:
        """Does nothing."""

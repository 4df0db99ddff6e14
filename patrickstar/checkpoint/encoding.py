"""Float32 elements that are stored in other bytes than their own."""

from __future__ import annotations

import enum

import torch

from patrickstar import _C


class Encoding(enum.Enum):
    """Moments of 8 bits: their codes, then one float32 scale for each 256 elements, as little-endian bytes.

    An element is its code's entry in the signed or unsigned dynamic map (Dettmers et al. 2021) times its block's scale.
    """

    SIGNED8 = "signed8"
    UNSIGNED8 = "unsigned8"

    @classmethod
    def of(cls, type_: _C.StateType) -> Encoding | None:
        """The encoding of an engine's array; None: its elements have a dtype."""
        return next((encoding for encoding, stored in _TYPES.items() if stored == type_), None)

    def num_bytes(self, numel: int) -> int:
        """Size of so many elements in bytes."""
        return numel + -(-numel // _C.optim.STATE_BLOCK) * torch.float32.itemsize

    def decode(self, data: memoryview, values: torch.Tensor) -> None:
        """Writes the elements to ``values``, in float32."""
        if values.numel() == 0:
            return
        codes = torch.frombuffer(data, dtype=torch.uint8)
        scales = codes[values.numel() :].clone()  # aligned
        state = _C.optim.StateArray(codes.data_ptr(), _TYPES[self], scales.data_ptr())
        _C.optim.expand_state(_C.optim.isa(), state, values.data_ptr(), values.numel())


_TYPES = {Encoding.SIGNED8: _C.StateType.SIGNED8, Encoding.UNSIGNED8: _C.StateType.UNSIGNED8}

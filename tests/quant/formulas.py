"""NF4 with double quantisation and int8 with PyTorch's operations, as bitsandbytes' own fallback computes them
(``bitsandbytes.functional`` and ``backends/default/ops.py`` of version 0.50). The mean of the scales is float64 here.
"""

from __future__ import annotations

import dataclasses

import torch

NF4_BLOCK, SCALE_BLOCK, INT8_BLOCK = 64, 256, 256
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def dynamic_map() -> torch.Tensor:
    """The signed dynamic map of 8 bits (Dettmers et al. 2021, appendix), ascending."""
    data = [0.0, 1.0]
    for exponent in range(7):
        boundaries = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10 ** (exponent - 6) * (boundaries[:-1] + boundaries[1:]) / 2.0
        data += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(data))


def nearest(values: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """The index of the nearest entry, the lower one of two."""
    return torch.bucketize(values, (entries[:-1] + entries[1:]) / 2)


def blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    values = values.reshape(-1)
    return torch.nn.functional.pad(values, (0, -values.numel() % size)).view(-1, size)


@dataclasses.dataclass
class Nf4:
    codes: torch.Tensor
    """Two to a byte, the first in the upper half."""
    block_scales: torch.Tensor
    scales: torch.Tensor
    offset: torch.Tensor
    numel: int

    @classmethod
    def of(cls, values: torch.Tensor, offset: torch.Tensor | None = None) -> Nf4:
        rows = blocks(values.float(), NF4_BLOCK)
        absmax = rows.abs().amax(1)
        codes = nearest(rows * (1 / absmax.clamp(min=1e-38))[:, None], NF4).to(torch.uint8).view(-1)
        codes = codes[: values.numel() + values.numel() % 2]
        offset = absmax.double().mean().float() if offset is None else offset
        distances = blocks(absmax - offset, SCALE_BLOCK)
        distances.view(-1)[absmax.numel() :] = 0
        scales = distances.abs().amax(1)
        block_scales = nearest(distances * (1 / scales.clamp(min=1e-38))[:, None], dynamic_map())
        block_scales = block_scales.view(-1)[: absmax.numel()].to(torch.uint8)
        return cls(codes[::2] << 4 | codes[1::2], block_scales, scales, offset, values.numel())

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        codes = torch.stack([self.codes >> 4, self.codes & 15], 1).view(-1)[: self.numel]
        scales = blocks(dynamic_map()[self.block_scales.long()], SCALE_BLOCK) * self.scales[:, None]
        absmax = (scales + self.offset).view(-1)[: self.block_scales.numel()]
        scaled = blocks(NF4[codes.long()], NF4_BLOCK) * absmax[:, None]
        return scaled.view(-1)[: self.numel].to(dtype)


@dataclasses.dataclass
class Int8:
    codes: torch.Tensor
    scales: torch.Tensor
    numel: int

    @classmethod
    def of(cls, values: torch.Tensor) -> Int8:
        rows = blocks(values.float(), INT8_BLOCK)
        scales = rows.abs().amax(1)
        # 127.0 / scales would be the reciprocal times 127, which is rounded twice.
        inverse = torch.where(scales > 0, torch.full_like(scales, 127.0) / scales, 0.0)
        codes = torch.round(rows * inverse[:, None]).to(torch.int8).view(-1)[: values.numel()]
        return cls(codes, scales, values.numel())

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        scaled = blocks(self.codes.float(), INT8_BLOCK) * self.scales[:, None] * 7.874015718698502e-3
        return scaled.view(-1)[: self.numel].to(dtype)


def dequantized(values: torch.Tensor, type: str, dtype: torch.dtype) -> torch.Tensor:
    quantized = Nf4.of(values) if type == "nf4" else Int8.of(values)
    return quantized.values(dtype).view(values.shape)

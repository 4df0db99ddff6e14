"""Costs of operations on a GPU, including fused attention, which the meta device lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from patrickstar.fp8.casting import TILE
from patrickstar.fp8.products import MULTIPLY
from patrickstar.planning.machines import Gpu

_aten = torch.ops.aten
_FREE = {  # launch no kernel, like views
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten._unsafe_view,
    _aten.promote_types,
}


@dataclasses.dataclass(frozen=True)
class FusedKernel:
    """A fused attention kernel: positions of its arguments, and its amount of work."""

    query: int
    """Index of the queries; keys and values follow."""
    causal: int
    dropout: int
    products: int
    """Products of queries x keys x head_dim: 2 in forward, 5 in backward. Half of them, rounded down, have the values'
    head_dim.
    """


FUSED_ATTENTION = {
    _aten._scaled_dot_product_flash_attention: FusedKernel(0, 4, 3, 2),
    _aten._scaled_dot_product_flash_attention_backward: FusedKernel(1, 11, 10, 5),
    _aten._scaled_dot_product_efficient_attention: FusedKernel(0, 6, 5, 2),
    _aten._scaled_dot_product_efficient_attention_backward: FusedKernel(1, 11, 9, 5),
}


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of ``_grouped_mm``. Offsets divide a dimension among groups, so that each row meets one group's matrix."""
    per_matrix = 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]
    return per_matrix * a.shape[0] if a.dim() == b.dim() == 3 else per_matrix


def _scaled_grouped_flops(
    a: torch.Tensor, b: torch.Tensor, _: Any, __: Any, offs: torch.Tensor, *___: Any, **____: Any
) -> int:
    """FLOPs of ``_scaled_grouped_mm``, without those of columns that fill groups up (``Groups.num_tiles``)."""
    flops = _grouped_flops(a, b)
    if a.dim() == b.dim() == 2:
        flops -= flops // a.shape[1] * offs.numel() * TILE
    return flops


_GROUPED = {
    operation: count
    for name, count in (("_grouped_mm", _grouped_flops), ("_scaled_grouped_mm", _scaled_grouped_flops))
    if (operation := getattr(_aten, name, None)) is not None
}


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one operation."""

    seconds: float
    flops: float = 0.0


class OperationCosts:
    """The costs of operations on one GPU."""

    def __init__(self, gpu: Gpu):
        self._gpu = gpu
        self._known: dict[Hashable, Cost] = {}

    def find(self, func: Any, key: Hashable, args: Any, kwargs: Any, out: Any) -> Cost | None:
        """Returns the cost of one call of ``func``; None if it launches no kernel.

        Args:
            key: determines the cost; None: do not cache it.
            out: the result of ``func``.
        """
        if func.is_view or func.overloadpacket in _FREE:
            return None
        cost = self._known.get(key)
        if cost is None:
            cost = self._count(func.overloadpacket, args, kwargs, out)
            if key is not None:
                self._known[key] = cost
        return cost

    def _count(self, packet: Any, args: Any, kwargs: Any, out: Any) -> Cost:
        inputs = tensors_in((args, kwargs))
        num_bytes = sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in [*inputs, *tensors_in(out)])
        seconds = max(num_bytes / self._gpu.memory_bytes_per_second, self._gpu.launch_seconds)
        if packet in FUSED_ATTENTION:
            attention = self._count_attention(FUSED_ATTENTION[packet], args, kwargs)
            return Cost(max(seconds, attention.seconds), attention.flops)
        count = _GROUPED.get(packet) or flop_registry.get(packet)
        if count is None or not inputs:
            return Cost(seconds)
        args = [arg for arg in args if not isinstance(arg, torch.dtype)]  # products with an explicit output dtype
        flops = float(count(*args, **kwargs, out_val=out))
        narrowest = min(tensor.itemsize for tensor in inputs)  # sums may be wider
        product = Cost(max(seconds, flops / self._gpu.matmul_flops(narrowest)), flops)
        return product if packet is not MULTIPLY.overloadpacket else self._with_cast(product, args[3])

    def _with_cast(self, product: Cost, weight: torch.Tensor) -> Cost:
        """The cost of a product whose weight is cast to 8 bits before."""
        num_bytes = weight.numel() * (weight.itemsize + 1)
        return Cost(product.seconds + num_bytes / self._gpu.memory_bytes_per_second, product.flops)

    def _count_attention(self, kernel: FusedKernel, args: Any, kwargs: Any) -> Cost:
        query, key, value = args[kernel.query : kernel.query + 3]
        causal = args[kernel.causal] if len(args) > kernel.causal else kwargs.get("is_causal", False)
        of_values = kernel.products // 2
        width = (kernel.products - of_values) * query.shape[-1] + of_values * value.shape[-1]
        flops = 2.0 * width * query.shape[:-1].numel() * key.shape[-2]
        return Cost(flops / self._gpu.attention_flops(query.itemsize, key.shape[-2], causal=causal), flops)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors among an operation's arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class FusedAttention(TorchFunctionMode):
    """Uses the GPU's fused kernel; the meta device would decompose attention into matrix products."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attention(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if attn_mask is None and query.itemsize == 2 and query.shape[-1] == value.shape[-1]:  # groups queries itself
        return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal)[0]
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    bias = attn_mask
    if bias is not None:
        bias = bias.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    return _aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, dropout_p, is_causal)[0]

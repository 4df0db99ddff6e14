"""Choice of the kernel that computes a block of attention: a pure function of the device and the block."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable

import torch
from torch.utils._triton import has_triton

from patrickstar.sequence.masking import Cover

_HALF = (torch.float16, torch.bfloat16)
_CUDNN_VERSION = 91501  # older versions are wrong for some lengths that 128 does not divide (pytorch/pytorch#169849)
_FLEX_TOKENS = 128  # for fewer queries PyTorch compiles another kernel, made for decoding
_CUDNN_TOKENS = 128  # for fewer, plans for each length cost more than they gain; 1 key is not supported


class Kernel(enum.Enum):
    """Named as in PyTorch's ``SDPBackend``."""

    CUDNN = "cudnn_attention"
    FLASH = "flash_attention"
    EFFICIENT = "efficient_attention"
    HOST = "flash_attention_for_cpu"
    FLEX = "flex_attention"
    PLAIN = "math"


@dataclasses.dataclass(frozen=True)
class AttentionDevice:
    """Facts about the device that computes a block.

    Attributes:
        type: ``"cpu"``, ``"cuda"`` or another.
        capability: of a GPU, such as (9, 0); otherwise (0, 0).
        cudnn: version of cuDNN, such as 91900; 0 without it.
        enabled: kernels that PyTorch has on the device and that the user did not switch off (``sdpa_kernel``,
            ``torch.backends.cuda.enable_flash_sdp`` and so on); ``PLAIN`` is always available.
    """

    type: str
    capability: tuple[int, int]
    cudnn: int
    enabled: frozenset[Kernel]

    @staticmethod
    def of(tensor: torch.Tensor) -> AttentionDevice:
        """The device of ``tensor``."""
        if tensor.device.type == "cpu":
            return AttentionDevice("cpu", (0, 0), 0, frozenset({Kernel.HOST}))
        if tensor.device.type != "cuda" or torch.version.hip:
            return AttentionDevice(tensor.device.type, (0, 0), 0, frozenset())
        return AttentionDevice(
            "cuda",
            torch.cuda.get_device_capability(tensor.device),
            torch.backends.cudnn.version() or 0,
            _enabled_on_cuda(),
        )


def _enabled_on_cuda() -> frozenset[Kernel]:
    switches = torch.backends.cuda
    enabled = set()
    # With that variable cuDNN's lse has another layout; it is not deterministic.
    avoids_plans = os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1"
    if switches.cudnn_sdp_enabled() and not avoids_plans and not torch.are_deterministic_algorithms_enabled():
        enabled.add(Kernel.CUDNN)
    if switches.flash_sdp_enabled() and switches.is_flash_attention_available():
        enabled.add(Kernel.FLASH)
    if switches.mem_efficient_sdp_enabled():
        enabled.add(Kernel.EFFICIENT)
    if has_triton():
        enabled.add(Kernel.FLEX)
    return frozenset(enabled)


@dataclasses.dataclass(frozen=True)
class Question:
    """Facts about a block.

    Attributes:
        dtype: of q, k and v.
        head_dims: of q and k, and of v.
        lengths: numbers of queries and keys.
        cover: how much of the block is seen.
        dropout_p: probability of dropout.
        softcap: bound of the scores; None: no bound.
    """

    dtype: torch.dtype
    head_dims: tuple[int, int]
    lengths: tuple[int, int]
    cover: Cover
    dropout_p: float
    softcap: float | None = None


def choose(device: AttentionDevice, question: Question) -> Kernel:
    """The fastest kernel that can compute the block.

    cuDNN is fastest on Hopper and not used elsewhere. Masks need memory-efficient attention, a soft cap needs flex
    attention. Dropout ([Note: dropout by position]) and float64 on a GPU need plain operations. Limits are those of
    PyTorch's own choice (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    if question.dropout_p > 0.0:
        return Kernel.PLAIN
    fused = _CAN if question.softcap is None else {Kernel.FLEX: _flex_can}
    for kernel, can in fused.items():
        if kernel in device.enabled and can(device, question):
            return kernel
    return Kernel.PLAIN


def _cudnn_can(device: AttentionDevice, question: Question) -> bool:
    return (
        device.capability[0] == 9
        and device.cudnn >= _CUDNN_VERSION
        and question.dtype in _HALF
        and question.cover is not Cover.SOME
        and all(dim % 8 == 0 and dim <= 128 for dim in question.head_dims)
        and min(question.lengths) >= _CUDNN_TOKENS
    )


def _flash_can(device: AttentionDevice, question: Question) -> bool:
    width = question.head_dims[0]
    # Backward of wide heads needs the shared memory of data centre GPUs.
    widest = 256 if device.capability in ((8, 0), (9, 0), (10, 0), (10, 3)) else 192
    return (
        device.capability >= (8, 0)
        and question.dtype in _HALF
        and question.cover is not Cover.SOME
        and question.head_dims == (width, width)
        and width % 8 == 0
        and width <= widest
    )


def _efficient_can(device: AttentionDevice, question: Question) -> bool:
    dtypes = (torch.float16, torch.float32) if device.capability < (8, 0) else (*_HALF, torch.float32)
    alignment = 4 if question.dtype is torch.float32 else 8
    return (
        device.capability >= (5, 0)
        and question.dtype in dtypes
        and all(dim % alignment == 0 and dim <= 256 for dim in question.head_dims)
    )


def _flex_can(device: AttentionDevice, question: Question) -> bool:
    return (
        device.capability >= (8, 0)
        and question.dtype in (*_HALF, torch.float32)
        and all(16 <= dim <= 256 for dim in question.head_dims)
        and min(question.lengths) >= _FLEX_TOKENS
    )


def _host_can(_device: AttentionDevice, question: Question) -> bool:
    return question.cover is not Cover.SOME and question.head_dims[0] == question.head_dims[1]


_CAN: dict[Kernel, Callable[[AttentionDevice, Question], bool]] = {
    Kernel.CUDNN: _cudnn_can,
    Kernel.FLASH: _flash_can,
    Kernel.EFFICIENT: _efficient_can,
    Kernel.HOST: _host_can,
}  # in order of preference
_TO_ALL_AND_DIAGONAL = frozenset({Cover.ALL, Cover.DIAGONAL})
WHOLE_BLOCKS: dict[Kernel, frozenset[Cover]] = {
    Kernel.CUDNN: _TO_ALL_AND_DIAGONAL,
    Kernel.FLASH: _TO_ALL_AND_DIAGONAL,
    Kernel.EFFICIENT: _TO_ALL_AND_DIAGONAL,
    Kernel.HOST: _TO_ALL_AND_DIAGONAL,
    Kernel.FLEX: frozenset({Cover.ALL}),
    Kernel.PLAIN: frozenset(),
}
"""Covers of blocks that a kernel computes in one call, without a mask and without computing what is not seen."""

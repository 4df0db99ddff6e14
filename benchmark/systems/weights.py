"""The model that every system trains: built without memory, then given the same values wherever it lies.

Values depend on a parameter's name and shape alone, are made on the GPU where there is one (18 billion in a second
instead of minutes), and are representable in bfloat16, so that a system that makes its float32 masters from 16-bit
parameters starts from the same point.

    model = build_meta_gpt(shape)       # parameters on the meta device
    ...                                 # whatever the system does before memory is allocated
    model.to_empty(device="cpu")
    fill_parameters(model)
"""

from __future__ import annotations

import math
import zlib

import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401  imported before an initialisation is timed
from torch import nn
from torch.distributed.tensor import DTensor

from benchmark.common import GptShape, build_gpt

_STD = 0.02  # GPT-2's


def build_meta_gpt(shape: GptShape) -> nn.Module:
    """The benchmark's GPT with its parameters on the meta device.

    Raises:
        RuntimeError: the model has buffers; their values would be lost on the meta device.
    """
    with torch.device("meta"):
        model = build_gpt(shape)
    buffers = [name for name, _ in model.named_buffers()]
    if buffers:
        raise RuntimeError(f"the model has buffers ({buffers[0]}, ...), which are not filled; use transformers >= 5.0")
    return model.train()


@torch.no_grad()
def fill_parameters(model: nn.Module) -> None:
    """Gives every parameter its initial value, as GPT-2 does: normal weights, those that end a residual branch scaled
    by the depth, LayerNorm the identity. Leaves no memory in PyTorch's GPU cache.

    Raises:
        ValueError: a parameter is sharded over several processes.
    """
    source = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(source)
    # Values from the GPU go to the host through this buffer: the many cores that widen them to float32 then also touch
    # the pages of their destination for the first time, which takes one core several times as long.
    staging = torch.empty(max(param.numel() for param in model.parameters()), dtype=torch.bfloat16)
    for name, param in model.named_parameters():
        target = param.to_local() if isinstance(param, DTensor) else param.detach()
        if target.shape != param.shape:
            raise ValueError(f"{name} is sharded: {tuple(target.shape)} of {tuple(param.shape)}; run on one process")
        if param.dim() == 1:
            target.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        ends_branch = name.endswith("c_proj.weight")
        std = _STD / math.sqrt(2 * model.config.n_layer) if ends_branch else _STD
        generator.manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(param.shape, dtype=torch.bfloat16, device=source).normal_(0.0, std, generator=generator)
        if target.device != values.device:
            values = staging[: values.numel()].view(values.shape).copy_(values)
        target.copy_(values)
    if source.type == "cuda":
        torch.cuda.empty_cache()

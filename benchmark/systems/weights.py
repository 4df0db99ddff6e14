"""The model that every system trains: built on the meta device, then filled with the same values in each system.

Values depend on a parameter's name and shape alone, so every system, number of ranks and way to shard starts from the
same point. A whole parameter is made at a time, on the GPU where there is one (18 billion values in a second instead of
minutes); a rank keeps its shard. Values are representable in bfloat16, for systems that make their float32 masters from
16-bit parameters.

    model = build_job_model(job)            # parameters on the meta device
    ...                                 # the system wraps or shards the model
    model.to_empty(device="cpu")
    fill_parameters(model)

PatrickStar materialises a model on the meta device by itself. It calls Hugging Face's ``_init_weights`` and gets the
same values; for a tensor-parallel model it reads them by name.
"""

from __future__ import annotations

import importlib
import math
import zlib

import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401  imported before an initialisation is timed
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from benchmark.common import Shape
from benchmark.ranks import training_device
from benchmark.systems import Job
from patrickstar.module.materialize import attach_values

_STD = 0.02  # GPT-2's


def build_job_model(job: Job) -> nn.Module:
    """The job's model on the meta device. ``torch.compile`` of the job's parts happens in its first call."""
    if job.kernels == "liger":
        importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama()
    model = build_meta_model(job.shape)
    if job.ranks_per_batch > 1:  # a shard's shape differs from what an initialiser would draw
        attach_values(model, NamedValues(model))
    if job.compiled == "blocks":
        for block in blocks(model):
            block.compile()
    elif job.compiled == "whole":
        model.compile()
    return model


def build_meta_model(shape: Shape) -> nn.Module:
    """The benchmark's model with its parameters and buffers on the meta device.

    Raises:
        RuntimeError: a buffer is not a rotary embedding's; its values would be lost on the meta device.
    """
    with torch.device("meta"):
        model = shape.build()
    for name, module in model.named_modules():
        if module._buffers and not _is_rotary(module):
            raise RuntimeError(f"{name} has buffers ({', '.join(module._buffers)}), which are not filled")
    initializer = NamedInitializer(model)
    for module in model.modules():
        if callable(getattr(module, "_init_weights", None)):  # the model, and the one without the output layer in it
            module._init_weights = initializer
    return model.train()


def blocks(model: nn.Module) -> nn.ModuleList:
    """The transformer's blocks."""
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def _is_rotary(module: nn.Module) -> bool:
    return "RotaryEmbedding" in type(module).__name__


class NamedInitializer:
    """Hugging Face's ``_init_weights`` for the benchmark's model: fills a module's own parameters on any device."""

    def __init__(self, model: nn.Module):
        self._names = {module: name for name, module in model.named_modules()}
        self._model = model

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        if _is_rotary(module):
            PreTrainedModel._init_weights(self._model, module)
        for name, param in module._parameters.items():
            if param is not None:
                full_name = f"{self._names[module]}.{name}".lstrip(".")
                param.copy_(initial_values(full_name, param.shape, self._model.config.num_hidden_layers, param.device))


class NamedValues:
    """Initial values by name, for tensor-parallel ranks: each whole parameter is made on the training device."""

    def __init__(self, model: nn.Module):
        self._shapes = {name: param.shape for name, param in model.named_parameters()}
        self._num_layers = model.config.num_hidden_layers

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def read(self, name: str) -> torch.Tensor:
        """See :class:`patrickstar.module.materialize.TensorValues`."""
        return initial_values(name, self._shapes[name], self._num_layers, training_device())


def initial_values(name: str, shape: torch.Size, num_layers: int, device: torch.device) -> torch.Tensor:
    """The whole parameter in bfloat16, as in GPT-2: normal weights, LayerNorm the identity.

    Weights at the end of a residual branch are scaled by the depth. Equal on all devices of a type.
    """
    values = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if len(shape) == 1:
        return values.fill_(0.0 if name.endswith("bias") else 1.0)
    std = _STD / math.sqrt(2 * num_layers) if name.endswith("c_proj.weight") else _STD
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return values.normal_(0.0, std, generator=generator)


@torch.no_grad()
def fill_parameters(model: nn.Module) -> None:
    """Fills every parameter or this rank's shard of it, and rotary embeddings on the training device.

    Empties PyTorch's GPU cache.

    Raises:
        ValueError: a parameter is sharded in another way than by rows over one group of ranks.
    """
    source = training_device()
    targets = {name: _local(param) for name, param in model.named_parameters()}
    # Values from the GPU go to the host through this buffer. The cores that widen them to float32 then also touch the
    # pages of their destination for the first time, which takes one core several times as long.
    staging = torch.empty(max(target.numel() for target in targets.values()), dtype=torch.bfloat16)
    for name, param in model.named_parameters():
        target = targets[name]
        values = _shard_of(initial_values(name, param.shape, model.config.num_hidden_layers, source), name, param)
        if target.device != values.device:
            values = staging[: values.numel()].view(values.shape).copy_(values)
        target.copy_(values)
    fill_rotary(model)
    if source.type == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def fill_rotary(model: nn.Module) -> None:
    """Fills rotary embeddings in float32 on the training device."""
    for module in filter(_is_rotary, model.modules()):
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty(buffer.shape, dtype=torch.float32, device=training_device())
        PreTrainedModel._init_weights(model, module)


def _local(param: nn.Parameter) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param.detach()


def _shard_of(values: torch.Tensor, name: str, param: nn.Parameter) -> torch.Tensor:
    """The rows of ``values`` in this rank's shard of ``param``."""
    if not isinstance(param, DTensor):
        return values
    mesh = param.device_mesh
    if param.placements != (Shard(0),):
        raise ValueError(f"{name} is placed as {param.placements}; only (Shard(dim=0),) can be filled")
    num_rows = -(-values.shape[0] // mesh.size())  # as torch.chunk divides
    begin = min(mesh.get_local_rank() * num_rows, values.shape[0])
    return values[begin : begin + num_rows]

"""Selection of parameters that are stored in 4 or 8 bits (csrc/quant/kernels.h): frozen weights of linear layers, as
transformers selects them for bitsandbytes.

Not selected: embeddings and weights tied to one, output embeddings, modules named ``lm_head``, biases, norms, and
PEFT's adapters. The configuration (``quantization``) selects for the whole model; ``patrickstar.from_pretrained``
selects for the model that it builds, also if adapters are added later.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from patrickstar import _C
from patrickstar.config import QuantizationConfig, QuantizationType
from patrickstar.module.linear_layers import linear_layers

QUANT_TYPES = {QuantizationType.NF4: _C.QuantType.NF4, QuantizationType.INT8: _C.QuantType.INT8}

_chosen: weakref.WeakKeyDictionary[nn.Module, QuantizationConfig] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class QuantizableWeight:
    """A linear layer's weight and its storage format if it is frozen."""

    name: str
    param: nn.Parameter
    type: _C.QuantType


def quantization_of(asked: Any) -> QuantizationConfig | None:
    """Validates ``from_pretrained``'s argument: a type's name, a dict like the configuration's section, or
    transformers' ``BitsAndBytesConfig``.

    Raises:
        ValueError: the format is not supported; the message names the supported ones.
    """
    if asked is None or isinstance(asked, QuantizationConfig):
        return asked
    if type(asked).__name__ == "BitsAndBytesConfig":
        return _of_bitsandbytes(asked)
    names = ", ".join(repr(member.value) for member in QuantizationType)
    section = {"type": asked} if isinstance(asked, str) else asked
    try:
        return QuantizationConfig.model_validate(section)
    except ValueError as error:
        raise ValueError(
            f'quantization is {asked!r}; give {names}, or a dict such as {{"type": "nf4", "skip_modules": ["gate"]}}'
        ) from error


def _of_bitsandbytes(asked: Any) -> QuantizationConfig:
    """Accepts NF4 with double quantisation, which is equivalent here (csrc/quant/kernels.h says where bits differ)."""
    skipped = tuple(asked.llm_int8_skip_modules or ())
    instead = f'quantization={{"type": "nf4", "skip_modules": {list(skipped)}}}' if skipped else 'quantization="nf4"'
    if asked.load_in_8bit:
        raise ValueError(
            "BitsAndBytesConfig(load_in_8bit=True) multiplies in int8 with outliers apart, which PatrickStar does not; "
            'give quantization="int8", which stores weights in 8 bits and computes in the compute dtype'
        )
    if not asked.load_in_4bit:
        raise ValueError("this BitsAndBytesConfig quantises nothing; leave it out")
    if asked.bnb_4bit_quant_type != "nf4" or not asked.bnb_4bit_use_double_quant:
        raise ValueError(
            f"BitsAndBytesConfig has bnb_4bit_quant_type={asked.bnb_4bit_quant_type!r} and bnb_4bit_use_double_quant="
            f"{asked.bnb_4bit_use_double_quant}; PatrickStar has NF4 with double quantisation: set them to 'nf4' and "
            f"True, or give {instead}"
        )
    return QuantizationConfig(type=QuantizationType.NF4, skip_modules=skipped)


def freeze_quantizable(module: nn.Module, quantization: QuantizationConfig) -> None:
    """Freezes the linear weights of ``module``; an engine that takes it, or a module around it, quantises them.

    Raises:
        ValueError: ``skip_modules`` names none of the modules.
    """
    for weight in _weights(module, quantization):
        weight.param.requires_grad_(False)
    _chosen[module] = quantization


def is_quantized(module: nn.Module, quantization: QuantizationConfig | None) -> bool:
    """Tests whether an engine should quantise weights of ``module``: by configuration or :func:`freeze_quantizable`."""
    return quantization is not None or any(child in _chosen for child in module.modules())


def quantizable_weights(
    module: nn.Module, quantization: QuantizationConfig | None = None
) -> dict[nn.Parameter, _C.QuantType]:
    """Storage format of each quantisable weight of ``module``, frozen or not.

    Args:
        module: the user's module.
        quantization: the configuration's section; None: that of :func:`freeze_quantizable`.

    Raises:
        ValueError: ``skip_modules`` names none of the modules.
    """
    if quantization is not None:
        return {weight.param: weight.type for weight in _weights(module, quantization)}
    found: dict[nn.Parameter, _C.QuantType] = {}
    for child in module.modules():
        if child in _chosen:
            found |= {weight.param: weight.type for weight in _weights(child, _chosen[child])}
    return found


def _weights(module: nn.Module, quantization: QuantizationConfig) -> Iterator[QuantizableWeight]:
    for layer in linear_layers(module, quantization.skip_modules, "quantization.skip_modules"):
        if layer.exclusion is None:
            yield QuantizableWeight(layer.name, layer.module.weight, QUANT_TYPES[quantization.type])

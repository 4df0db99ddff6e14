"""Norms and embeddings of other libraries, recognised by what they compute on a few numbers.

    kind = recognise_norm(module, 1024)          # None: it computes none of the norms that have a form over a mesh
    factor = embedding_factor(module)            # 1.0 for torch.nn.Embedding

Classes with the same name compute different things (Gemma's RMS norm adds one to its weight), and one norm has many
names. Parameters are replaced during the computation, so their values may be on the meta device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12)
_LARGEST_EPS = 1e-2
_TOLERANCE = 1e-4
"""Largest relative difference: some norms compute in float32."""
_TOKENS = 4
_ROWS_OF_TABLE = 3


@dataclasses.dataclass(frozen=True)
class NormKind:
    """One norm of the last dimension: ``normed * (weight + offset) + bias``."""

    features: int
    eps: float
    has_mean: bool
    """True: deviations from the mean are normed (layer norm). False: RMS norm."""
    offset: float
    has_weight: bool
    has_bias: bool


def recognise_norm(module: nn.Module, width: int) -> NormKind | None:
    """The norm that ``module`` computes, or None.

    Args:
        module: without submodules.
        width: features of activations, for a norm without parameters.
    """
    own = {name: param for name, param in module._parameters.items() if param is not None}
    if next(module.children(), None) is not None or any(param.dim() != 1 for param in own.values()):
        return None
    if not own.keys() <= {"weight", "bias"} or len({len(param) for param in own.values()}) > 1:
        return None
    if not own and "norm" not in type(module).__name__.lower():
        return None
    features = len(next(iter(own.values()))) if own else width
    kind = next(_agreeing(module, features, own), None)
    if kind is not None and isinstance(module, nn.RMSNorm) and module.eps is None:  # that of the activations' dtype
        dtype = next(iter(own.values())).dtype if own else torch.float32
        return dataclasses.replace(kind, eps=torch.finfo(dtype).eps)
    return kind


def _agreeing(module: nn.Module, features: int, own: dict[str, nn.Parameter]) -> Iterator[NormKind]:
    with torch.no_grad(), torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        values = {
            name: 0.5 + torch.rand(features, generator=generator, dtype=torch.float64, device="cpu") for name in own
        }
        # The squares of the last tokens are of the order of eps.
        scale = torch.logspace(0, -5, _TOKENS, dtype=torch.float64, device="cpu")[:, None]
        tokens = scale * (0.3 + torch.randn(_TOKENS, features, generator=generator, dtype=torch.float64, device="cpu"))
        try:
            found = functional_call(module, values, (tokens,))
        except Exception:  # another library's code may raise anything
            return
        if not isinstance(found, torch.Tensor) or found.shape != tokens.shape:
            return
        for eps in _possible_eps(module):
            for has_mean in (False, True):
                for offset in (0.0, 1.0) if "weight" in own else (0.0,):
                    kind = NormKind(features, eps, has_mean, offset, "weight" in own, "bias" in own)
                    expected = _computed(kind, tokens, values)
                    if (found - expected).abs().max() <= _TOLERANCE * expected.abs().max():
                        yield kind


def _possible_eps(module: nn.Module) -> list[float]:
    own = [value for name, value in vars(module).items() if type(value) is float and 0 <= value <= _LARGEST_EPS]
    return list(dict.fromkeys((*own, *_USUAL_EPS, torch.finfo(torch.float64).eps)))


def _computed(kind: NormKind, tokens: torch.Tensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
    centred = tokens - tokens.mean(-1, keepdim=True) if kind.has_mean else tokens
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + kind.eps)
    weighted = normed * (values["weight"] + kind.offset) if kind.has_weight else normed
    return weighted + values["bias"] if kind.has_bias else weighted


def embedding_factor(module: nn.Embedding) -> float | None:
    """The number by which ``module`` multiplies rows of its table; None if it computes something else."""
    if type(module).forward is nn.Embedding.forward and "forward" not in vars(module):
        return 1.0
    with torch.no_grad(), torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        shape = _ROWS_OF_TABLE, module.embedding_dim
        table = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
        tokens = torch.arange(_ROWS_OF_TABLE, device="cpu")
        try:
            found = functional_call(module, {"weight": table, **_real_buffers(module)}, (tokens,))
        except Exception:  # another library's code may raise anything
            return None
        if not isinstance(found, torch.Tensor) or found.shape != table.shape:
            return None
        factor = (found / table).mean().item()
        agrees = math.isfinite(factor) and (found - factor * table).abs().max() <= _TOLERANCE * abs(factor)
    return factor if agrees else None


def _real_buffers(module: nn.Module) -> dict[str, Any]:
    """Buffers on the CPU. Those of one element on the meta device get the value of an attribute of a similar name,
    where a constructor keeps what it filled the buffer with.
    """
    found = {}
    for name, buffer in module.named_buffers():
        if not buffer.is_meta:
            found[name] = buffer.cpu()
            continue
        value = next((value for key, value in vars(module).items() if key.endswith(name) and key != name), None)
        if buffer.numel() == 1 and isinstance(value, (int, float)):
            found[name] = torch.tensor(value, dtype=torch.float64, device="cpu")
    return found

"""Recurrent layers of Hugging Face models under context parallelism.

    layers = RecurrentLayers(model)
    output = model(**arguments, **layers.arguments(call))     # of this rank
    layers.restore()

A layer such as ``Qwen3NextGatedDeltaNet`` calls functions of its module for whatever mixes tokens: a causal convolution
and a scan. transformers takes these from causal-conv1d, flash-linear-attention or mamba-ssm, or computes them with
PyTorch. Each such layer gets a forward of its own, with the same code, in which these functions exchange tokens first
(:mod:`patrickstar.sequence.recurrent`). Models pass unknown arguments on to their layers, so the call travels as one;
a checkpointed layer gets it again in recomputation.
"""

from __future__ import annotations

import contextvars
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from patrickstar.sequence.recurrent import Scan, sharded_convolution, sharded_scan
from patrickstar.sequence.sharded_attention import ShardedCall, note_layer, running_call

_CALL = "sequence_call"
"""The argument that carries the call."""
_CONVOLUTION = "causal_conv1d_fn"
_DELTA_RULE = Scan(by_head=("value", "g", "beta"), by_key_head=("query", "key"), per_head=())
_SCANS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": Scan(
        by_head=("hidden_states", "dt", "z"), by_key_head=("B", "C"), per_head=("A", "D", "dt_bias")
    ),
}
_FUSED = "mamba2_split_conv1d_scan_combined"
"""Convolution and scan in one; returns None where it is not available, and the layer then calls both."""
_OTHER_SCANS = ("mamba_selective_scan", "mamba_inner_fn")
_REPLACED = {_CONVOLUTION, *_SCANS, _FUSED}
_PACKED = ("seq_idx", "cu_seq_lens_q")

_told: contextvars.ContextVar[ShardedCall | None] = contextvars.ContextVar("told", default=None)


def recurrent_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers by name whose forward calls a causal convolution or a scan.

    Raises:
        ValueError: a layer has a scan that cannot be sharded.
    """
    found = {}
    for name, module in model.named_modules():
        calls = getattr(getattr(_forward_of(module), "__code__", None), "co_names", ())
        other = next((scan for scan in _OTHER_SCANS if scan in calls), None)
        if other is not None:
            raise ValueError(
                f"{type(model).__name__} has layers with {other} ({type(module).__name__}), whose sequences cannot be "
                "divided; leave sequence_parallel out"
            )
        if not {_CONVOLUTION, *_SCANS}.isdisjoint(calls):
            found[name] = module
    return found


class RecurrentLayers:
    """Replaces the forward of a model's recurrent layers until :meth:`restore`.

    Raises:
        ValueError: a layer has a scan that cannot be sharded.
    """

    def __init__(self, model: nn.Module):
        self.layers = recurrent_layers(model)
        self._forwards = [(layer, vars(layer).get("forward")) for layer in self.layers.values()]
        for layer in self.layers.values():
            layer.forward = _ShardedForward(layer)  # type: ignore[method-assign]

    def arguments(self, call: ShardedCall) -> dict[str, Any]:
        """Further arguments of the model. A cache would keep states of some heads, or of some tokens."""
        return {_CALL: call, "use_cache": False} if self.layers else {}

    def restore(self) -> None:
        """Restores the layers."""
        for layer, forward in self._forwards:
            vars(layer).pop("forward", None)
            vars(layer).update({} if forward is None else {"forward": forward})


class _ShardedForward:
    """Replaces the forward of one layer."""

    def __init__(self, layer: nn.Module):
        plain = _forward_of(layer)
        names = _REPLACED.intersection(plain.__code__.co_names)
        replaced = {name: _exchanging(name, plain.__globals__[name]) for name in names}
        forward = types.FunctionType(
            plain.__code__, {**plain.__globals__, **replaced}, plain.__name__, plain.__defaults__, plain.__closure__
        )
        forward.__kwdefaults__ = plain.__kwdefaults__
        self._layer, self._forward = layer, forward

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward, of this rank's tokens if the model was given a call.

        Raises:
            ValueError: the model did not pass the call on, or documents are packed.
        """
        note_layer(self._layer)
        call: ShardedCall | None = kwargs.pop(_CALL, None)
        running = running_call()
        if call is None and running is not None:
            raise ValueError(
                f"{running.layers.shown(self._layer)} is not told by its model that ranks share the sequence; leave "
                "sequence_parallel out"
            )
        if call is not None and any(kwargs.get(name) is not None for name in _PACKED):
            raise ValueError(
                f"{call.layers.shown(self._layer)} is given the bounds of packed documents ({' or '.join(_PACKED)}), "
                "which a sharded sequence does not keep apart; give each document a row, with an attention_mask"
            )
        token = _told.set(call)
        try:
            return self._forward(self._layer, *args, **kwargs)
        finally:
            _told.reset(token)


def _exchanging(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function called ``name`` of a layer's module, over the sharded sequence of the running call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        call = _told.get()
        if call is None:
            return function(*args, **kwargs)
        if name == _FUSED:
            return None
        if name == _CONVOLUTION:
            return sharded_convolution(call.group, call.division, function, *args, **kwargs)
        return sharded_scan(call.group, call.division, _SCANS[name], function, *args, **kwargs)

    return run


def _forward_of(module: nn.Module) -> Any:
    """The function that the module's class defines as its forward, without decorators."""
    return inspect.unwrap(type(module).forward)

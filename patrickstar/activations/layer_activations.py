"""The activation tier of each checkpointed layer between its forward and its backward.

layers = LayerActivations(module, offload store, attention)
layers.choose({"model.layers.0": ActivationTier.KEEP, "model.layers.7": ActivationTier.OFFLOAD})
with layers.running():
    loss = module(...)
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.activations.activation_rules import ActivationTier
from patrickstar.activations.offloaded_activations import OffloadStore
from patrickstar.activations.selective_attention import SelectiveAttention
from patrickstar.module.checkpointed_layers import (
    checkpointable_modules,
    is_checkpointing,
    options_of_checkpoint,
    replaced_checkpoints,
)
from patrickstar.module.compiled.door import get_call
from patrickstar.module.observed_buffers import buffer_places


class LayerActivations:
    """Applies one choice of tiers in the forwards of one engine. Initially all layers are recomputed.

    Hugging Face gives each layer a checkpoint function. During a training forward a replacement looks up the layer's
    tier:

    * RECOMPUTE checkpoints as before;
    * KEEP calls the layer without a checkpoint; saved tensors stay on the device;
    * OFFLOAD calls the layer without a checkpoint; saved tensors go to the host at the layer's end.

    No tier changes a number: a checkpoint replays the layer's random numbers, and a layer without one draws them once.
    Three kinds of layers are refused, for which this fails:

    * layers whose checkpoint draws new random numbers;
    * layers with running statistics, which a recomputation updates again;
    * compiled layers, whose code differs with a checkpoint.

    All ranks must make the same choice for the same forward, since a recomputed layer enqueues its collectives again.

    Args:
        module: the model.
        offload store: of the engine; None: no activation may leave the device.
        attention: selective recomputation for recomputed layers; None: attention is recomputed too.
    """

    def __init__(self, module: nn.Module, offload_store: OffloadStore | None, attention: SelectiveAttention | None):
        self._module = module
        self._offload_store = offload_store
        self._attention = attention
        self._checkpointable = checkpointable_modules(module)
        self._chosen: dict[nn.Module, ActivationTier] = {}  # without RECOMPUTE
        self._around: set[nn.Module] = set()  # modules that call the chosen layers
        self._now: dict[nn.Module, ActivationTier] = {}  # in the last forward

    def choose(self, tiers: Mapping[str, ActivationTier]) -> None:
        """Sets the tiers from the next training forward on, by layer name. Other layers are recomputed.

        Later a layer runs as without a tier if it was compiled or stopped checkpointing. The same holds within the
        user's own checkpoint or hooks on saved tensors.

        Raises:
            ValueError: a layer cannot have its tier; the message names it. Nothing is changed.
        """
        modules = dict(self._module.named_modules())
        chosen: dict[nn.Module, ActivationTier] = {}
        around: set[nn.Module] = set()
        for name, tier in tiers.items():
            if tier is ActivationTier.RECOMPUTE:
                continue
            path = name.split(".") if name else []
            callers = [modules[".".join(path[:depth])] for depth in range(len(path))] if name in modules else []
            if obstacle := self._obstacle(modules.get(name), tier) or _obstacle_around(callers):
                raise ValueError(f"activations of layer {name!r} cannot rest on the {tier.value}: {obstacle}")
            chosen[modules[name]] = tier
            around.update(callers)
        self._chosen, self._around = chosen, around

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Wraps a training forward, within the offload store's ``keeping``."""
        before, self._now = self._now, {} if _obstacle_around(self._around) else self._chosen
        if self._now != before and self._offload_store is not None:
            self._offload_store.working.start_anew()
        layers = self._now if self._attention is None else self._checkpointable
        return replaced_checkpoints(layers, functools.partial(self._run, _hooks_on_saved_tensors()))

    def _run(
        self, hooks: Any, layer: nn.Module, function: Any, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        tier = None if torch.compiler.is_compiling() else self._now.get(layer)
        if tier is not None and hooks == _hooks_on_saved_tensors() and not _own_obstacle(layer, function.keywords):
            with contextlib.nullcontext() if self._offload_store is None else self._offload_store.resting(tier):
                return call(*args, **kwargs)
        if self._attention is not None:
            return self._attention.checkpoint(layer, function, call, *args, **kwargs)
        return function(call, *args, **kwargs)

    def _obstacle(self, layer: nn.Module | None, tier: ActivationTier) -> str:
        """Why ``layer`` cannot have ``tier``, with the remedy; empty if it can."""
        if tier is ActivationTier.OFFLOAD and self._offload_store is None:
            return 'nothing may leave the device; set "activations": {"offload": "auto"}'
        if layer is None or not _is_layer(layer):
            return "the model has no GradientCheckpointingLayer of that name; take one of named_modules()"
        return _own_obstacle(layer, options_of_checkpoint(layer))


def _is_layer(module: nn.Module) -> bool:
    layers = sys.modules.get("transformers.modeling_layers")
    return layers is not None and isinstance(module, layers.GradientCheckpointingLayer)


def _hooks_on_saved_tensors() -> Any:
    """The innermost hooks on saved tensors.

    Within the user's own checkpoint around a layer they are that checkpoint's. Its backward calls the layer again,
    without a tier.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _own_obstacle(layer: nn.Module, options: Mapping[str, Any] | None) -> str:
    if options is None or options.get("preserve_rng_state") is False:
        return (
            "it does not checkpoint now, or not in a way that can be left out; call "
            'gradient_checkpointing_enable({"use_reentrant": False}) without further options'
        )
    if any(place.is_statistic for place in buffer_places(layer)):
        return "a recomputation updates its running statistics once more; leave it to be recomputed"
    if any(get_call(child) is not None for child in layer.modules()):
        return "it is compiled, and without a checkpoint its code is another one; leave it to be recomputed"
    return ""


def _obstacle_around(callers: Iterable[nn.Module]) -> str:
    for module in callers:
        if get_call(module) is not None:
            return "a module around it is compiled; leave it to be recomputed"
        if _is_layer(module) and is_checkpointing(module):
            return "a layer around it checkpoints as well; choose the tier of that one"
    return ""

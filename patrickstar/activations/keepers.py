"""In what an engine runs forwards whose backward comes: where their activations are kept, by its configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from patrickstar import _C
from patrickstar.activations.activation_rules import LEAST_ATTENTION_TOKENS
from patrickstar.activations.kept_attention import KeptAttention
from patrickstar.activations.layer_activations import LayerActivations
from patrickstar.activations.stashed_activations import ActivationStash
from patrickstar.config import ActivationOffload, ActivationsConfig, KeepAttention
from patrickstar.module.checkpointed_layers import checkpointable_modules, is_checkpointing
from patrickstar.module.chunked_parameter import ChunkedParameter


def keeper_of_activations(
    module: nn.Module, section: ActivationsConfig, runtime: _C.Runtime, device: torch.device, chunk_bytes: int
) -> ActivationKeeper:
    """What each training forward of ``module`` runs in. Its parameters are where they stay; the largest module's chunks
    take ``chunk_bytes``.
    """
    if section.offload is ActivationOffload.NEVER:
        return StayingActivations(LayerActivations(module, None, None))
    params = (param for param in module.parameters() if isinstance(param, ChunkedParameter))
    stash = ActivationStash(runtime, device, {param._patrickstar.storage for param in params}, chunk_bytes)
    attention = None
    if section.keep_attention is not KeepAttention.NEVER:
        least_tokens = 0 if section.keep_attention is KeepAttention.ALWAYS else LEAST_ATTENTION_TOKENS
        attention = KeptAttention(stash, least_tokens)
    layers = LayerActivations(module, stash, attention)
    if section.offload is ActivationOffload.ALWAYS:
        return AllActivations(stash, layers)
    return CheckpointedActivations(module, stash, layers)


class ActivationKeeper(Protocol):
    """Whose forwards keep activations, and where."""

    layers: LayerActivations
    """Where those of each layer rest."""

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward whose backward comes."""
        ...

    def forget(self) -> None:
        """The forward ran out of memory and is run again."""
        ...

    def end_backward(self) -> None:
        """One is over."""
        ...

    def finish(self) -> None:
        """Returns when no copy runs any more."""
        ...


class StayingActivations:
    """They stay on the device, as autograd has them."""

    def __init__(self, layers: LayerActivations):
        self.layers = layers

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """Without a stash."""
        return self.layers.running()

    def forget(self) -> None:
        """Nothing was known."""

    def end_backward(self) -> None:
        """Nothing is learned."""

    def finish(self) -> None:
        """There is none."""


class AllActivations:
    """Whatever autograd saves may leave."""

    def __init__(self, stash: ActivationStash, layers: LayerActivations):
        self._stash = stash
        self.layers = layers

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """In the stash."""
        with self._stash.keeping(), self.layers.running():
            yield

    def forget(self) -> None:
        """The stash does."""
        self._stash.forget()

    def end_backward(self) -> None:
        """Of the stash's."""
        self._stash.end_backward()

    def finish(self) -> None:
        """The stash's."""
        self._stash.finish()


class CheckpointedActivations:
    """Those of a model of Hugging Face may leave while it checkpoints layers, and stay otherwise, being many then."""

    def __init__(self, module: nn.Module, stash: ActivationStash, layers: LayerActivations):
        self.layers = layers
        self._checkpointable = checkpointable_modules(module)
        self._all = AllActivations(stash, layers)

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """As the layers are just then."""
        checkpoints = any(map(is_checkpointing, self._checkpointable))
        return self._all.keeping() if checkpoints else contextlib.nullcontext()

    def forget(self) -> None:
        """The stash does."""
        self._all.forget()

    def end_backward(self) -> None:
        """Of the stash's."""
        self._all.end_backward()

    def finish(self) -> None:
        """The stash's."""
        self._all.finish()

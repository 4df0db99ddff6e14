"""The context of each training forward, by the configuration's ``activations``: which activations may be offloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from patrickstar import _C
from patrickstar.activations.activation_rules import LEAST_ATTENTION_TOKENS, LEAST_SENT_BYTES
from patrickstar.activations.checkpoint_calls import CheckpointCalls
from patrickstar.activations.offloaded_activations import OffloadStore, most_leaving
from patrickstar.activations.products_on_host import ProductsOnHost
from patrickstar.activations.selective_recomputation import SelectiveAttention
from patrickstar.config import ActivationOffload, ActivationsConfig, KeepAttention
from patrickstar.module.checkpointed_layers import checkpointable_modules, is_checkpointing
from patrickstar.module.chunked_parameter import ChunkedParameter


def activation_offloader(
    module: nn.Module, section: ActivationsConfig, runtime: _C.Runtime, device: torch.device, chunk_bytes: int
) -> ActivationOffloader:
    """The context of training forwards of ``module``, whose parameters are in chunks.

    Args:
        module: of the engine.
        section: of the configuration.
        runtime: the core.
        device: of the engine.
        chunk_bytes: device bytes of the largest module's chunks.
    """
    if section.offload is ActivationOffload.NEVER:
        return StayingActivations(CheckpointCalls(module))
    params = (param for param in module.parameters() if isinstance(param, ChunkedParameter))
    offload_store = OffloadStore(runtime, device, {param._patrickstar.storage for param in params}, chunk_bytes)
    attention = None
    if section.keep_attention is not KeepAttention.NEVER:
        least_tokens = 0 if section.keep_attention is KeepAttention.ALWAYS else LEAST_ATTENTION_TOKENS
        attention = SelectiveAttention(offload_store, least_tokens)
    on_host = ProductsOnHost(
        runtime,
        least_bytes=min(LEAST_SENT_BYTES, offload_store.least_bytes),
        most_leaving=most_leaving(device),
    )
    calls = CheckpointCalls(module, offload_store, on_host, attention)
    if section.offload is ActivationOffload.ALWAYS:
        return AllActivations(offload_store, calls)
    return CheckpointedActivations(module, offload_store, calls)


class ActivationOffloader(Protocol):
    """Decides which forwards keep activations in the offload memory."""

    calls: CheckpointCalls
    """The checkpointed calls of its forwards."""

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """Wraps a forward whose backward follows."""
        ...

    def forget(self) -> None:
        """Called before a forward that ran out of memory is run again."""
        ...

    def end_backward(self) -> None:
        """Called after each backward."""
        ...

    def finish(self) -> None:
        """Waits for all running copies."""
        ...


class StayingActivations:
    """Leaves activations on the device, as autograd saves them."""

    def __init__(self, calls: CheckpointCalls):
        self.calls = calls

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """See :class:`ActivationOffloader`."""
        return self.calls.running()

    def forget(self) -> None:
        """Does nothing."""

    def end_backward(self) -> None:
        """Does nothing."""

    def finish(self) -> None:
        """Does nothing."""


class AllActivations:
    """Lets every tensor leave that autograd saves."""

    def __init__(self, offload_store: OffloadStore, calls: CheckpointCalls):
        self._offload_store = offload_store
        self.calls = calls

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """See :class:`ActivationOffloader`."""
        with self._offload_store.keeping(), self.calls.running():
            yield

    def forget(self) -> None:
        """See :class:`ActivationOffloader`."""
        self._offload_store.forget()

    def end_backward(self) -> None:
        """See :class:`ActivationOffloader`."""
        self._offload_store.end_backward()

    def finish(self) -> None:
        """See :class:`ActivationOffloader`."""
        self._offload_store.finish()
        self.calls.finish()


class CheckpointedActivations:
    """Lets activations of a Hugging Face model leave only while it checkpoints layers. Otherwise they are too many."""

    def __init__(self, module: nn.Module, offload_store: OffloadStore, calls: CheckpointCalls):
        self.calls = calls
        self._checkpointable = checkpointable_modules(module)
        self._all = AllActivations(offload_store, calls)

    def keeping(self) -> contextlib.AbstractContextManager[None]:
        """See :class:`ActivationOffloader`. Follows the model's present checkpointing."""
        checkpoints = any(map(is_checkpointing, self._checkpointable))
        return self._all.keeping() if checkpoints else self.calls.running()

    def forget(self) -> None:
        """See :class:`ActivationOffloader`."""
        self._all.forget()

    def end_backward(self) -> None:
        """See :class:`ActivationOffloader`."""
        self._all.end_backward()

    def finish(self) -> None:
        """See :class:`ActivationOffloader`."""
        self._all.finish()

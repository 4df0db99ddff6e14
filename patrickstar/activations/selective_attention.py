"""Selective recomputation: results of attention in checkpointed layers are kept, and backward does not compute them
again.

    attention = SelectiveAttention(offload store, least_tokens=32768)
    output = attention.checkpoint(layer, function, call, *args)  # for function(call, *args), within
    offload_store.keeping()

The implementation uses ``context_fn`` of ``torch.utils.checkpoint.checkpoint`` and a dispatch mode below autograd, as
PyTorch's selective checkpointing does. Models, attention functions and sequence parallelism need no changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from patrickstar.activations.offloaded_activations import Offloaded, OffloadStore

_aten = torch.ops.aten


def _kernels() -> Iterator[Any]:
    for name in ("cudnn_attention", "flash_attention", "efficient_attention", "flash_attention_for_cpu"):
        operation = getattr(_aten, f"_scaled_dot_product_{name}", None)
        if operation is not None:
            yield operation.default


_DROPOUT_AT = {kernel: [arg.name for arg in kernel._schema.arguments].index("dropout_p") for kernel in _kernels()}
"""Position of ``dropout_p`` among the arguments of each PyTorch kernel whose results backward needs."""


class SelectiveAttention:
    """Selective recomputation of attention in the checkpointed layers of a Hugging Face model.

    For n tokens and h channels in 16 bits, causal attention's forward makes 2 h n bytes with 2 h n^2 operations. At
    262,144 tokens an H200 computes for one second what the link carries in 0.04 s. So the output and log-sum-exp of
    each call are kept if the offload store has room beside the inputs of the following layers (see ``OffloadStore``).
    The recomputation then reads them instead of calling the kernel. The kept bits are the kernel's, so the number of
    kept calls changes no result.

    Args:
        offload store: of the engine.
        least_tokens: layers with fewer tokens are recomputed completely.
    """

    def __init__(self, offload_store: OffloadStore, least_tokens: int):
        self._offload_store = offload_store
        self._least_tokens = least_tokens

    def checkpoint(
        self, layer: nn.Module, function: Callable[..., Any], call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs ``function``, the non-reentrant checkpoint of ``layer``, with ``call``, and keeps its attention results.

        Compiled layers are left unchanged.
        """
        hidden = args[0] if args else None
        is_long = isinstance(hidden, torch.Tensor) and hidden.dim() > 1 and hidden.shape[-2] >= self._least_tokens
        if not is_long or _is_compiled(layer):
            return function(call, *args, **kwargs)
        return function(call, *args, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[_Keeping, _Recalling]:
        results: list[_Results | None] = []
        return _Keeping(self._offload_store, results), _Recalling(results)


def _is_compiled(layer: nn.Module) -> bool:
    return any(child._compiled_call_impl is not None for child in layer.modules())


class _Results:
    """Results of one kernel call: numbers, and tensors, of which the large ones are in the offload store."""

    def __init__(self, offload_store: OffloadStore, results: tuple[Any, ...]):
        # Detached, so that they do not hold the graph that they belong to.
        self._kept = [
            offload_store.keep(value.detach()) if isinstance(value, torch.Tensor) else value for value in results
        ]

    def take(self) -> tuple[Any, ...] | None:
        """The results; None if one was changed in place after it was kept."""
        if any(isinstance(value, Offloaded) and not value.is_unchanged for value in self._kept):
            return None
        taken = (value.take() if isinstance(value, Offloaded) else value for value in self._kept)
        return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in taken)


class _Keeping(TorchDispatchMode):
    """Dispatch mode of a layer's forward; keeps attention results while there is room."""

    def __init__(self, offload_store: OffloadStore, results: list[_Results | None]):
        super().__init__()
        self._offload_store = offload_store
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if func in _DROPOUT_AT:
            num_bytes = sum(value.nbytes for value in given if isinstance(value, torch.Tensor))
            # Only without dropout: a skipped call would not draw its random numbers.
            keeps = _dropout_p(func, args, kwargs) == 0.0 and self._offload_store.has_room_beside_inputs(num_bytes)
            self._results.append(_Results(self._offload_store, given) if keeps else None)
        return given


class _Recalling(TorchDispatchMode):
    """Dispatch mode of the recomputation, which makes the same calls in the same order."""

    def __init__(self, results: list[_Results | None]):
        super().__init__()
        self._results = results
        self._position = 0

    def __enter__(self) -> Any:
        self._position = 0  # a retained graph may be recomputed several times
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPOUT_AT:
            kept = self._results[self._position]
            self._position += 1
            given = None if kept is None else kept.take()
            if given is not None:
                return given
        return func(*args, **(kwargs or {}))


def _dropout_p(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> float:
    place = _DROPOUT_AT[kernel]
    return args[place] if len(args) > place else (kwargs or {}).get("dropout_p", 0.0)

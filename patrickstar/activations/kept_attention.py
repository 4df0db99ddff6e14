"""What attention gives in checkpointed layers, kept so that backward's recomputation need not compute it again.

    attention = KeptAttention(stash, least_tokens=32768)
    output = attention.checkpoint(layer, function, call, *args)  # for function(call, *args), within stash.keeping()

[Note: kept attention] Of n tokens attention over h channels gives 2 h n bytes in 16 bits and takes 2 h n^2 operations
(causal, forward): at 262,144 tokens an H200 computes a second for what the link carries in 0.04. So each call's output
and log-sum-exp are kept in the stash ([Note: kept activations]) where it says that there is room beside the inputs of
the layers that are still to come, and the recomputation gets them instead of calling the kernel. Its bits are the
same: what is kept is what the kernel gave, so it does not matter to any number how many calls are kept.

The seam is PyTorch's: ``context_fn`` of ``torch.utils.checkpoint.checkpoint``, and a dispatch mode below autograd, as
its selective checkpointing has. So models, attention functions and sequence parallelism need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from patrickstar.activations.stashed_activations import ActivationStash, Stashed

_aten = torch.ops.aten


def _kernels() -> Iterator[Any]:
    for name in ("cudnn_attention", "flash_attention", "efficient_attention", "flash_attention_for_cpu"):
        operation = getattr(_aten, f"_scaled_dot_product_{name}", None)
        if operation is not None:
            yield operation.default


_DROPOUT_AT = {kernel: [arg.name for arg in kernel._schema.arguments].index("dropout_p") for kernel in _kernels()}
"""Of PyTorch's kernels that backward wants the results of, which argument is ``dropout_p``."""


class KeptAttention:
    """Keeps attention of the checkpointed layers of a model of Hugging Face.

    Args:
        stash: of the engine.
        least_tokens: calls of layers with fewer tokens are left alone.
    """

    def __init__(self, stash: ActivationStash, least_tokens: int):
        self._stash = stash
        self._least_tokens = least_tokens

    def checkpoint(
        self, layer: nn.Module, function: Callable[..., Any], call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs ``function``, the non-reentrant checkpoint of ``layer``, with ``call``, and keeps its attention. Layers
        that are compiled stay as they are.
        """
        hidden = args[0] if args else None
        is_long = isinstance(hidden, torch.Tensor) and hidden.dim() > 1 and hidden.shape[-2] >= self._least_tokens
        if not is_long or _is_compiled(layer):
            return function(call, *args, **kwargs)
        return function(call, *args, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[_Keeping, _Recalling]:
        results: list[_Results | None] = []
        return _Keeping(self._stash, results), _Recalling(results)


def _is_compiled(layer: nn.Module) -> bool:
    return any(child._compiled_call_impl is not None for child in layer.modules())


class _Results:
    """Of one call of a kernel: tensors, of which the large ones are in the stash, and numbers."""

    def __init__(self, stash: ActivationStash, results: tuple[Any, ...]):
        # Detached, so that they do not hold the graph that they are to be part of.
        self._kept = [stash.keep(value.detach()) if isinstance(value, torch.Tensor) else value for value in results]

    def take(self) -> tuple[Any, ...] | None:
        """None: one was changed in place after it was kept."""
        if any(isinstance(value, Stashed) and not value.is_unchanged for value in self._kept):
            return None
        taken = (value.take() if isinstance(value, Stashed) else value for value in self._kept)
        return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in taken)


class _Keeping(TorchDispatchMode):
    """A layer's forward: what its attention gives is kept while there is room."""

    def __init__(self, stash: ActivationStash, results: list[_Results | None]):
        super().__init__()
        self._stash = stash
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if func in _DROPOUT_AT:
            num_bytes = sum(value.nbytes for value in given if isinstance(value, torch.Tensor))
            # Without dropout alone: a call that is left out would not draw the random numbers that it drew.
            keeps = _dropout_p(func, args, kwargs) == 0.0 and self._stash.has_room_beside_inputs(num_bytes)
            self._results.append(_Results(self._stash, given) if keeps else None)
        return given


class _Recalling(TorchDispatchMode):
    """The recomputation: the same calls in the same order."""

    def __init__(self, results: list[_Results | None]):
        super().__init__()
        self._results = results
        self._position = 0

    def __enter__(self) -> Any:
        self._position = 0  # of a graph that is kept there may be another one
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

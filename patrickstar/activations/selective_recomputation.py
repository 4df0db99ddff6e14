"""Selective recomputation: results of expensive operations in a checkpointed call are kept, and its recomputation reads
them instead of computing them again.

    contexts = keep_products(needed, place)
    contexts = SelectiveAttention(offload_store, least_tokens=32768).contexts  # in the offload store
    checkpoint(function, *args, use_reentrant=False, context_fn=contexts)

A dispatch mode below autograd keeps and reads results, as PyTorch's selective checkpointing does. Models, attention
functions and sequence parallelism need no changes. Kept bits are the kernel's, so no number changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from patrickstar.activations.host_copies import HostCopy
from patrickstar.activations.offloaded_activations import OffloadStore
from patrickstar.activations.products_on_host import OnDevice, ProductPlace
from patrickstar.fp8.products import MULTIPLY, cast_and_multiply

_aten = torch.ops.aten


class OperationMode(TorchDispatchMode):
    """A dispatch mode that leaves compiled functions compiled and lets higher-order operators, such as flex attention,
    pass. PyTorch's modes of selective checkpointing do the same.
    """

    lets_all_pass = hasattr(TorchDispatchMode, "supports_higher_order_operators")
    """False before PyTorch has modes that let higher-order operators pass."""
    supports_higher_order_operators = True
    sees_casts = False
    """Read by :mod:`patrickstar.fp8.casting`: casts to 8 bits need not be operators, and products in 8 bits are
    functions that ``__torch_dispatch__`` is given.
    """

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: compiled functions run compiled, before PyTorch has :meth:`ignore_compile_internals`."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled functions run compiled."""
        return True


Contexts = tuple[TorchDispatchMode, TorchDispatchMode]
"""Modes of a forward and of its recomputation."""


def _attention_kernels() -> Iterator[Any]:
    for name in ("cudnn_attention", "flash_attention", "efficient_attention", "flash_attention_for_cpu"):
        operation = getattr(_aten, f"_scaled_dot_product_{name}", None)
        if operation is not None:
            yield operation.default


_DROPOUT_AT = {
    kernel: [arg.name for arg in kernel._schema.arguments].index("dropout_p") for kernel in _attention_kernels()
}
"""Position of ``dropout_p`` among the arguments of each PyTorch kernel whose results backward needs."""
_MATRIX_PRODUCTS = frozenset(
    [
        MULTIPLY,
        cast_and_multiply,
        *(
            operation.default
            for name in ("mm", "addmm", "_grouped_mm", "_scaled_mm")
            if (operation := getattr(_aten, name, None)) is not None
        ),
    ]
)
"""Products with parameters. Batched ones are left out: attention in several steps writes into their results."""


def is_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """True for matrix products and for attention without dropout. A skipped call must not draw random numbers. False
    while a compiler traces.
    """
    is_one = func in _MATRIX_PRODUCTS or (func in _DROPOUT_AT and _dropout_p(func, args, kwargs) == 0.0)
    return is_one and not any(isinstance(arg, FakeTensor) for arg in args)


class NeededProducts:
    """Number of a call's products that its recomputation computes or reads.

    A recomputation ends when autograd has all tensors that the forward saved. A layer's last product is needed only if
    a later operation saves it.

    Attributes:
        most: number in the last recomputation; None: not known yet, all products are kept.
    """

    def __init__(self, most: int | None = None):
        self.most = most

    def note(self, *operation: Any) -> bool:
        """:func:`is_product`; counts those of a recomputation."""
        is_one = is_product(*operation)
        self.most = (self.most or 0) + is_one
        return is_one


def keep_products(needed: NeededProducts | None = None, place: ProductPlace | None = None) -> Contexts:
    """The contexts of a call whose first products stay in ``place`` (None: on the device) until its backward: as many
    as ``needed`` says (None: all).
    """
    results: list[_Results | None] = []
    needed, place = needed or NeededProducts(), place or ProductPlace()
    most = needed.most

    def is_needed(*operation: Any) -> bool:
        return (most is None or len(results) < most) and is_product(*operation)

    def keep(func: Any, args: Any, kwargs: Any, given: tuple[Any, ...]) -> list[Any]:
        return [place.keep(_alias(value)) if isinstance(value, torch.Tensor) else value for value in given]

    return _KeepingProducts(results, is_needed, keep, place), _RecallingProducts(results, needed, place)


class ComparedProducts:
    """Proof that products are as :func:`keep_products` assumes: a call leaves them as they are, and its recomputation
    makes the same bits.

    Kernels outside PyTorch may write into a product without changing its version, and others may not be deterministic.
    Products are held until their call's forward ends. Then their sums remain.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def differs(self) -> bool:
        """True if a product had other bits later. Waits for the device."""
        return any(bool(before != after) for before, after in self._pairs)

    def contexts(self) -> Contexts:
        """The contexts of one call."""
        sums: list[torch.Tensor | None] = []
        return _Summing(self._pairs, sums), _Comparing(self._pairs, sums)


class _Summing(OperationMode):
    """Mode of a forward: sums each product when it is made, and again at the end."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], sums: list[torch.Tensor | None]):
        super().__init__()
        self._pairs = pairs
        self._sums = sums
        self._held: list[OnDevice] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if is_product(func, args, kwargs):
            for value in _float_results(given):
                self._held.append(OnDevice(_alias(value)))
                self._sums.append(_sum_of_bits(value))
        return given

    def __exit__(self, *exception: Any) -> Any:
        result = super().__exit__(*exception)
        for index, value in enumerate(self._held):
            before = self._sums[index]
            if not value.is_unchanged:
                self._sums[index] = None  # keep_products() sees that too
            elif before is not None:
                self._pairs.append((before, _sum_of_bits(value.take())))
        self._held = []
        return result


class _Comparing(OperationMode):
    """Mode of the recomputation: compares its products' sums with the forward's."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], sums: list[torch.Tensor | None]):
        super().__init__()
        self._pairs = pairs
        self._sums = sums

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if self._sums and is_product(func, args, kwargs):
            for value in _float_results(given):
                before = self._sums.pop(0)
                if before is not None:
                    self._pairs.append((before, _sum_of_bits(value)))
        return given


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _float_results(given: Any) -> list[torch.Tensor]:
    """Attention's integer results describe random numbers, which nobody draws without dropout."""
    values = (given,) if isinstance(given, torch.Tensor) else given
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the elements' bits as integers, an int64 on the tensor's device."""
    return tensor.detach().view(_INTEGERS[tensor.itemsize]).sum(dtype=torch.int64)


class SelectiveAttention:
    """Selective recomputation of attention in long sequences.

    For n tokens and h channels in 16 bits, causal attention's forward makes 2 h n bytes with 2 h n^2 operations. At
    262,144 tokens an H200 computes for one second what the link carries in 0.04 s. So the output and log-sum-exp of
    each call are kept if the offload store has room beside the inputs of the following layers (see ``OffloadStore``).

    Args:
        offload_store: of the engine.
        least_tokens: calls with fewer tokens are recomputed completely.
    """

    def __init__(self, offload_store: OffloadStore, least_tokens: int):
        self._offload_store = offload_store
        self._least_tokens = least_tokens

    def serves(self, hidden: Any) -> bool:
        """True if ``hidden``, a call's first argument of shape [..., tokens, channels], is long enough."""
        return isinstance(hidden, torch.Tensor) and hidden.dim() > 1 and hidden.shape[-2] >= self._least_tokens

    def contexts(self) -> Contexts:
        """The contexts of one call, within ``offload_store.keeping()``."""
        results: list[_Results | None] = []
        return _Keeping(results, _is_attention, self._kept), _Recalling(results, _is_attention)

    def _kept(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: tuple[Any, ...]
    ) -> list[Any] | None:
        if _dropout_p(func, args, kwargs) != 0.0:
            return None
        num_bytes = sum(value.nbytes for value in given if isinstance(value, torch.Tensor))
        if not self._offload_store.has_room_beside_inputs(num_bytes):
            return None
        # Detached, so that they do not hold the graph that they belong to.
        return [self._offload_store.keep(v.detach()) if isinstance(v, torch.Tensor) else v for v in given]


def _is_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    return func in _DROPOUT_AT


def _dropout_p(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> float:
    place = _DROPOUT_AT[kernel]
    return args[place] if len(args) > place else (kwargs or {}).get("dropout_p", 0.0)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without its graph, with the version counter of the one that the model sees."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _Results:
    """Results of one operation: numbers, and tensors that are kept.

    Attributes:
        operation: that gave them.
    """

    def __init__(self, operation: Any, kept: list[Any], is_single: bool):
        self.operation = operation
        self._kept = kept
        self._is_single = is_single

    def take(self) -> Any:
        """The results; None if one was changed in place after it was kept."""
        if any(isinstance(value, (HostCopy, OnDevice)) and not value.is_unchanged for value in self._kept):
            return None
        taken = [value.take() if isinstance(value, (HostCopy, OnDevice)) else value for value in self._kept]
        taken = [value.detach() if isinstance(value, torch.Tensor) else value for value in taken]
        return taken[0] if self._is_single else tuple(taken)


class _Keeping(OperationMode):
    """Mode of a forward: keeps results of operations that ``counts`` as far as ``keep`` returns them."""

    def __init__(self, results: list[_Results | None], counts: Callable[..., bool], keep: Callable[..., Any]):
        super().__init__()
        self._results = results
        self._counts = counts
        self._keep = keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if self._counts(func, args, kwargs):
            is_single = isinstance(given, torch.Tensor)
            kept = self._keep(func, args, kwargs or {}, (given,) if is_single else given)
            self._results.append(None if kept is None else _Results(func, kept, is_single))
        return given


class _KeepingProducts(_Keeping):
    """Mode of a forward: keeps products in ``place``."""

    def __init__(
        self, results: list[_Results | None], counts: Callable[..., bool], keep: Callable[..., Any], place: ProductPlace
    ):
        super().__init__(results, counts, keep)
        self._place = place

    def __exit__(self, exc_type: Any, *exception: Any) -> Any:
        result = super().__exit__(exc_type, *exception)
        if exc_type is None:
            self._place.end_forward()
        return result


class _Recalling(OperationMode):
    """Mode of the recomputation, which makes the same calls in the same order. Where it makes others, it computes."""

    def __init__(self, results: list[_Results | None], counts: Callable[..., bool]):
        super().__init__()
        self._results = results
        self._counts = counts
        self._position = 0

    def __enter__(self) -> Any:
        self._position = 0  # a retained graph is recomputed again, then completely
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._counts(func, args, kwargs):
            kept = self._next()
            given = None if kept is None or kept.operation is not func else kept.take()
            if given is not None:
                return given
        return func(*args, **(kwargs or {}))

    def _next(self) -> _Results | None:
        """The next results, which the list does not hold any more."""
        if self._position == len(self._results):
            return None
        kept, self._results[self._position] = self._results[self._position], None
        self._position += 1
        return kept


class _RecallingProducts(_Recalling):
    """Mode of the recomputation: reads products from ``place``, and notes how many it needs."""

    def __init__(self, results: list[_Results | None], needed: NeededProducts, place: ProductPlace):
        super().__init__(results, needed.note)
        self._needed = needed
        self._place = place

    def __enter__(self) -> Any:
        self._needed.most = 0
        self._place.begin_recomputation()
        return super().__enter__()

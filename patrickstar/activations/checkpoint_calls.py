"""Calls of ``torch.utils.checkpoint.checkpoint`` in the training forwards of one engine, and what each of them saves.

    calls = CheckpointCalls(module, offload_store, on_host, attention)
    calls.choose([Saved.PRODUCTS_ON_HOST, Saved.NOTHING, Saved.PRODUCTS])  # by number within a forward
    with calls.running():
        loss = module(...)

Hugging Face's layers and modules of users call the same function. With ``use_reentrant=False`` it runs a generator
around the call, which is replaced within :meth:`CheckpointCalls.running`. Compiled graphs do not call it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from patrickstar.activations.activation_rules import Saved
from patrickstar.activations.offloaded_activations import OffloadStore
from patrickstar.activations.products_on_host import ProductPlace, ProductsOnHost
from patrickstar.activations.selective_recomputation import (
    Contexts,
    NeededProducts,
    OperationMode,
    SelectiveAttention,
    keep_products,
)
from patrickstar.module.compiled.door import get_call
from patrickstar.module.observed_buffers import buffer_places

_GENERATOR = "_checkpoint_without_reentrant_generator"
_TOP_HOOKS = "_top_saved_tensors_default_hooks"
_lock = threading.Lock()
_running = threading.local()  # .calls: those of the thread's running forward
_num_running = 0
_original: Any = None


class CallObserver(Protocol):
    """Measures calls that save nothing."""

    def forward(self, number: int, args: tuple[Any, ...]) -> contextlib.AbstractContextManager[None]:
        """Wraps the forward of a call."""
        ...

    def recomputation(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Wraps its recomputation."""
        ...

    def operations(self) -> contextlib.AbstractContextManager[Any]:
        """Within a recomputation whose operations are seen, wraps these."""
        ...

    def contexts(self, number: int) -> Contexts | None:
        """Contexts of a call whose operations are seen; None: it needs none."""
        ...


class CheckpointCalls:
    """Applies one choice of :class:`Saved` in the forwards of one engine. At first calls save nothing.

    No choice changes a number: a checkpoint replays its call's random numbers, and a call without recomputation draws
    them once. Calls keep PyTorch's checkpoint without change in these cases:

    * the model has running statistics, which a recomputation updates again;
    * ``preserve_rng_state=False``, or a ``context_fn`` of the user;
    * within another checkpoint, or within other hooks on saved tensors than the engine's;
    * products of compiled modules, whose operations a dispatch mode does not see.

    All ranks must make the same choice for the same forward, since a recomputation enqueues its collectives again.

    Args:
        module: the model.
        offload_store: of the engine; None: inputs of calls stay on the device.
        on_host: of the engine; None: no product may leave the device.
        attention: selective recomputation for calls that save nothing; None: attention is recomputed too.
    """

    def __init__(
        self,
        module: nn.Module,
        offload_store: OffloadStore | None = None,
        on_host: ProductsOnHost | None = None,
        attention: SelectiveAttention | None = None,
    ):
        self._module = module
        self._offload_store = offload_store
        self._on_host = on_host
        self._attention = attention
        self._has_statistics = any(place.is_statistic for place in buffer_places(module))
        self._saved: tuple[Saved, ...] = ()
        self._in_last_forward: tuple[Saved, ...] = ()
        self._observer: CallObserver | None = None
        self._needed: dict[int, NeededProducts] = {}  # by number of the call
        self._num_calls = 0  # in this forward
        self._is_inside = False
        self._hooks: Any = None  # the engine's own on saved tensors
        self._popped: Any = None  # these, while a call runs without them
        self._sees_operations: bool | None = None  # in this forward; None: not asked yet

    @property
    def saved(self) -> tuple[Saved, ...]:
        """The choice, by number of the call within a forward. Further calls save nothing."""
        return self._saved

    @property
    def sees_operations(self) -> bool:
        """True if a dispatch mode may see the operations of calls: no module of the last forward was compiled."""
        if self._sees_operations is None:
            is_compiled = any(get_call(child) is not None for child in self._module.modules())
            self._sees_operations = OperationMode.lets_all_pass and not is_compiled
        return self._sees_operations

    @property
    def may_send(self) -> bool:
        """True if products may leave the device."""
        return self._on_host is not None

    @property
    def obstacle(self) -> str:
        """Why calls of this model keep PyTorch's checkpoint; empty if they need not."""
        if self._has_statistics:
            return "a recomputation updates the running statistics of its batch norms once more"
        if not _is_replaceable():
            return f"this PyTorch ({torch.__version__}) has no {_GENERATOR} with the expected arguments"
        if not hasattr(torch._C._autograd, _TOP_HOOKS):
            return f"this PyTorch ({torch.__version__}) does not tell its hooks on saved tensors (no {_TOP_HOOKS})"
        return ""

    def choose(self, saved: Sequence[Saved]) -> None:
        """Sets what calls save from the next training forward on.

        Raises:
            ValueError: nothing may leave the device, or the model keeps PyTorch's checkpoint. Nothing is changed.
        """
        if Saved.PRODUCTS_ON_HOST in saved and not self.may_send:
            raise ValueError(
                'products cannot be saved on the host: nothing may leave the device; set "activations": '
                '{"offload": "auto"}'
            )
        if self.obstacle and any(kept is not Saved.NOTHING for kept in saved):
            raise ValueError(f"checkpointed calls cannot save activations: {self.obstacle}")
        self._saved = tuple(saved)

    def expect_products(self, needed: Mapping[int, int]) -> None:
        """Sets the number of products that each call's recomputation needs, by number of the call. Each recomputation
        corrects it.
        """
        self._needed = {number: NeededProducts(most) for number, most in needed.items()}

    def observe(self, observer: CallObserver | None) -> None:
        """Lets ``observer`` measure the next forwards and their recomputations."""
        self._observer = observer

    def finish(self) -> None:
        """Waits for all running copies of products to the host."""
        if self._on_host is not None:
            self._on_host.finish()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Wraps a training forward, within the offload store's ``keeping``."""
        if self.obstacle:
            yield
            return
        if self._saved != self._in_last_forward and self._offload_store is not None:
            self._offload_store.working.start_anew()
        self._in_last_forward = self._saved
        self._num_calls, self._is_inside, self._hooks = 0, False, _hooks_on_saved_tensors()
        self._sees_operations = None
        if self._on_host is not None:
            self._on_host.begin_forward()
        before = getattr(_running, "calls", None)
        _running.calls = self
        _replace()
        try:
            yield
        finally:
            _restore()
            _running.calls = before
            self._push_again()  # where an exception left a call

    def run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        """The generator around one call, in place of ``original``, with its arguments."""
        bound = _signature_of(original).bind(*args, **kwargs)
        given = bound.arguments
        is_plain = given.get("preserve_rng_state", True) and (
            given.get("context_fn", torch_checkpoint.noop_context_fn) is torch_checkpoint.noop_context_fn
        )
        if self._is_inside or not torch.is_grad_enabled() or self._hooks != _hooks_on_saved_tensors():
            yield from original(*args, **kwargs)
            return
        number, self._num_calls = self._num_calls, self._num_calls + 1
        saved = self._saved[number] if number < len(self._saved) and is_plain else Saved.NOTHING
        self._is_inside = True
        try:
            if saved is Saved.EVERYTHING:
                yield from self._run_without_hooks()
            else:
                if is_plain:
                    self._prepare(number, saved, bound)
                yield from self._observed(number, bound, original(*bound.args, **bound.kwargs))
        finally:
            self._is_inside = False

    def _prepare(self, number: int, saved: Saved, bound: inspect.BoundArguments) -> None:
        """Sets the arguments of a checkpoint: what it keeps, and its observed recomputation."""
        name, function = next(iter(bound.arguments.items()))
        contexts: Callable[[], Contexts] | None = None
        if saved in (Saved.PRODUCTS, Saved.PRODUCTS_ON_HOST) and self.sees_operations:
            place = ProductPlace() if self._on_host is None else self._on_host.place(saved)
            contexts = functools.partial(keep_products, self._needed.setdefault(number, NeededProducts()), place)
        elif self._attention is not None and self._attention.serves(_first_of(bound)) and self.sees_operations:
            contexts = self._attention.contexts
        observer = self._observer
        if contexts is None and observer is not None and self.sees_operations:
            wanted = observer.contexts(number)
            contexts = None if wanted is None else lambda: wanted
        if contexts is not None:
            bound.arguments["context_fn"] = contexts
        if observer is not None:
            operations = observer.operations if self.sees_operations else contextlib.nullcontext

            def observed(*args: Any, **kwargs: Any) -> Any:
                with observer.recomputation(number), operations():
                    return function(*args, **kwargs)

            bound.arguments[name] = observed

    def _observed(self, number: int, bound: inspect.BoundArguments, generator: Any) -> Iterator[None]:
        """Runs the checkpoint's ``generator`` with the observer within its hooks on saved tensors."""
        if self._observer is None:
            yield from generator
            return
        next(generator)
        try:
            with self._observer.forward(number, bound.arguments.get("args", ())):
                yield
        except BaseException as error:
            generator.throw(error)
            raise
        next(generator, None)

    def _run_without_hooks(self) -> Iterator[None]:
        """Without the offload store's hooks, autograd saves tensors as usual and checks them for changes in place."""
        if self._hooks is not None and getattr(self._hooks[0], "__self__", None) is self._offload_store:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._popped = self._hooks
        try:
            yield
        finally:
            self._push_again()

    def _push_again(self) -> None:
        if self._popped is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._popped)
            self._popped = None


def _first_of(bound: inspect.BoundArguments) -> Any:
    """The first argument of the checkpointed function."""
    args = bound.arguments.get("args", ())
    return args[0] if args else None


def _hooks_on_saved_tensors() -> Any:
    """The innermost hooks on saved tensors; None if there are none. Within a checkpoint they are the checkpoint's."""
    return getattr(torch._C._autograd, _TOP_HOOKS)(True)


_signature_of = functools.cache(inspect.signature)


@functools.cache
def _is_replaceable() -> bool:
    generator = getattr(torch_checkpoint, _GENERATOR, None)
    if not inspect.isgeneratorfunction(generator):
        return False
    return {"preserve_rng_state", "context_fn", "args", "kwargs"} <= set(_signature_of(generator).parameters)


def _replace() -> None:
    global _num_running, _original
    with _lock:
        if _num_running == 0:
            _original = getattr(torch_checkpoint, _GENERATOR)
            setattr(torch_checkpoint, _GENERATOR, functools.partial(_route, _original))
        _num_running += 1


def _restore() -> None:
    global _num_running
    with _lock:
        _num_running -= 1
        if _num_running == 0:
            setattr(torch_checkpoint, _GENERATOR, _original)


def _route(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The generator of a call in any thread."""
    calls: CheckpointCalls | None = getattr(_running, "calls", None)
    return original(*args, **kwargs) if calls is None else calls.run(original, *args, **kwargs)

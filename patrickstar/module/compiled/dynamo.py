"""What is known here of the inside of ``torch.compile`` (PyTorch 2.6 to 2.13); no other file names its private parts.

A module is compiled in one of two ways: ``torch.compile(module)`` is another module around it (a *wrapper*), and
``module.compile()`` sets the function that its call runs. Either was made with a :class:`Compiler`, which compiles
other functions with the same backend, mode and options.

``torch._dynamo`` is imported where it is needed: importing it takes a second.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from patrickstar import _C

_Function = TypeVar("_Function", bound=Callable[..., Any])
_REASON = "PatrickStar runs between graphs; leave fullgraph=True out, or compile with engine.compile(fullgraph=True)"
_CUDA_GRAPHS = "triton.cudagraphs"  # inductor's option, in mode="reduce-overhead" and "max-autotune"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiler:
    """Backend, mode and options of one ``torch.compile``."""

    compile: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Takes a function and returns it compiled."""
    one_graph: bool
    """Whether what it compiles must be one graph (``fullgraph=True``), or is known to nobody but itself."""
    cuda_graphs: bool = False
    """Whether it records CUDA graphs, in which addresses of parameters stand."""


def make_compiler(options: Mapping[str, Any]) -> Compiler | None:
    """That of ``torch.compile(..., **options)``; None where that compiles nothing (``disable=True``)."""

    def nothing() -> None:
        pass

    compiled = torch.compile(nothing, **options)
    return None if compiled is nothing else _compiler_of_function(compiled)


def compiler_of_wrapper(wrapper: nn.Module) -> Compiler | None:
    """What a wrapper was made with; None: with ``torch.compiler.disable``."""
    return compiler_of_context(wrapper.dynamo_ctx) if callable(wrapper.dynamo_ctx.callback) else None


def compiler_of_call(module: nn.Module, call: Callable[..., Any] | None) -> Compiler | None:
    """What ``module.compile()`` made ``call`` with; None: it did not."""
    if call is None or getattr(call, "__func__", None) is type(module)._call_impl:  # the second: disable=True
        return None
    return _compiler_of_function(call)


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` or ``torch.compiler.disable`` gave for another."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module in a wrapper; any other is itself."""
    return module._orig_mod if is_wrapper(module) else module


def without_wrappers(name: str) -> str:
    """The name that a parameter or module has where none is compiled by ``torch.compile(module)``."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def outside_of_graphs(function: _Function) -> _Function:
    """``function`` is part of no graph: a compiled caller calls it as it is, and nothing within it is compiled for that
    caller.
    """

    def call(_caller: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return functools.wraps(function)(knowing_caller(call))  # type: ignore[return-value]


def knowing_caller(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for ``function(caller, *args, **kwargs)``, where ``caller`` stands for what compiles the function that
    calls (:func:`compiler_of_caller`), or is None.
    """
    set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame

    def call(*args: Any, **kwargs: Any) -> Any:
        caller = set_eval_frame(None)
        try:
            return function(caller, *args, **kwargs)
        finally:
            set_eval_frame(caller)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return call


def keep_out_of_graphs() -> None:
    """Makes Dynamo know of all functions of :func:`knowing_caller`; they share a code object. Before one is called."""
    from torch._dynamo.decorators import skip

    skip(knowing_caller(print))


class RecompileLimit:
    """Room for each of ``num_blocks`` blocks to be a variant of its own of the code that they share, beside those that
    PyTorch allows for one (``torch._dynamo.config.recompile_limit``); until `restore`. Several add up, and end in any
    order.

    What a block of Hugging Face's reads of a cache of keys and values is different in each layer. Past the limit Dynamo
    leaves the other blocks uncompiled: slower, and with other roundings.
    """

    _ours: ClassVar[int | None] = None
    """What the limit was set to here last."""

    def __init__(self, num_blocks: int):
        from torch._dynamo import config

        self._num_blocks = num_blocks
        RecompileLimit._ours = config.recompile_limit = config.recompile_limit + num_blocks

    def restore(self) -> None:
        """Takes the room back, unless somebody else has set the limit since."""
        from torch._dynamo import config

        if config.recompile_limit == RecompileLimit._ours:
            RecompileLimit._ours = config.recompile_limit = config.recompile_limit - self._num_blocks


def compiler_of_caller(caller: Any) -> Compiler | None:
    """That which ``caller`` of :func:`knowing_caller` stands for."""
    if not callable(caller):
        return None
    from torch._dynamo.eval_frame import _TorchDynamoContext

    return compiler_of_context(_TorchDynamoContext(caller))


def check_no_compiled_autograd() -> None:
    """Raises StateError where backward itself would be compiled: nodes of the graph would not say when they run."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.compiled_autograd_enabled:
        raise _C.StateError(
            "compiled autograd is on (torch._dynamo.config.compiled_autograd or compiled_autograd._enable), which "
            "compiles backward as a whole and so hides when it uses which parameter; leave it off, compiled modules "
            "have a compiled backward without it"
        )


def _compiler_of_function(compiled: Callable[..., Any]) -> Compiler:
    context = _context_of(compiled)
    if context is None:  # made by other means: it is called as it is
        return Compiler(compile=lambda function: function, one_graph=True)
    return compiler_of_context(context)


def compiler_of_context(context: Any) -> Compiler:
    """That which a wrapper has as its ``dynamo_ctx``."""
    return Compiler(compile=context, one_graph=_is_one_graph(context), cuda_graphs=_records_cuda_graphs(context))


def _context_of(compiled: Callable[..., Any]) -> Any:
    """The context that made ``compiled``, which is in its closure."""
    from torch._dynamo.eval_frame import _TorchDynamoContext

    for function in (compiled, getattr(compiled, "get_compiler_config", None)):
        for cell in getattr(function, "__closure__", None) or ():
            if isinstance(cell.cell_contents, _TorchDynamoContext):
                return cell.cell_contents
    return None


def _inner(callback: Any) -> Any:
    """What a layer of callbacks and backends is around, or None."""
    return getattr(callback, "_torchdynamo_orig_backend", None) or getattr(callback, "_torchdynamo_orig_callable", None)


def _is_one_graph(context: Any) -> bool:
    said = getattr(context, "fullgraph", None)  # newer versions
    return said if said is not None else type(_inner(context.callback)).__name__ == "ConvertFrameAssert"


def _records_cuda_graphs(context: Any) -> bool:
    backend = context.callback
    while _inner(backend) is not None:
        backend = _inner(backend)
    if getattr(backend, "compiler_name", None) == "cudagraphs":
        return True
    get_config = getattr(backend, "get_compiler_config", None)
    return bool(((get_config() if get_config is not None else None) or {}).get(_CUDA_GRAPHS, False))

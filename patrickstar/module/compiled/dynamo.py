"""All knowledge of ``torch.compile``'s private parts (PyTorch 2.6 to 2.13); no other file names them.

A module is compiled in one of two ways: ``torch.compile(module)`` returns a *wrapper* module, and ``module.compile()``
sets the function that its call runs. Both stem from a :class:`Compiler`, which can compile other functions with the
same backend, mode and options.

``torch._dynamo`` is imported lazily: importing it takes a second.
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
_CUDA_GRAPHS = "triton.cudagraphs"  # inductor's option, set by mode="reduce-overhead" and "max-autotune"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiler:
    """Backend, mode and options of one ``torch.compile``."""

    compile: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Compiles a function."""
    one_graph: bool
    """True if the compiled code must be one graph: ``fullgraph=True``, or a compiler that cannot be inspected."""
    cuda_graphs: bool = False
    """True if it records CUDA graphs, which contain the addresses of parameters."""


def make_compiler(options: Mapping[str, Any]) -> Compiler | None:
    """The compiler of ``torch.compile(..., **options)``; None if that compiles nothing (``disable=True``)."""

    def nothing() -> None:
        pass

    compiled = torch.compile(nothing, **options)
    return None if compiled is nothing else _compiler_of_function(compiled)


def compiler_of_wrapper(wrapper: nn.Module) -> Compiler | None:
    """The compiler of a wrapper; None for ``torch.compiler.disable``."""
    return compiler_of_context(wrapper.dynamo_ctx) if callable(wrapper.dynamo_ctx.callback) else None


def compiler_of_call(module: nn.Module, call: Callable[..., Any] | None) -> Compiler | None:
    """The compiler with which ``module.compile()`` made ``call``; None if it did not."""
    # the second condition is disable=True
    if call is None or getattr(call, "__func__", None) is type(module)._call_impl:
        return None
    return _compiler_of_function(call)


def is_wrapper(module: nn.Module) -> bool:
    """Tests whether ``module`` is a wrapper by ``torch.compile`` or ``torch.compiler.disable``."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and isinstance(module, frames.OptimizedModule)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module in a wrapper; any other module is returned unchanged."""
    return module._orig_mod if is_wrapper(module) else module


def without_wrappers(name: str) -> str:
    """A parameter's or module's name with the wrappers' parts removed."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def outside_of_graphs(function: _Function) -> _Function:
    """Keeps ``function`` out of graphs: a compiled caller calls it uncompiled, and nothing within it is compiled for
    that caller.
    """

    def call(_caller: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return functools.wraps(function)(knowing_caller(call))  # type: ignore[return-value]


def knowing_caller(function: Callable[..., Any]) -> Callable[..., Any]:
    """:func:`outside_of_graphs` for ``function(caller, *args, **kwargs)``. ``caller`` identifies the compiler of the
    calling function (:func:`compiler_of_caller`), or is None.
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
    """Registers all functions of :func:`knowing_caller`, which share a code object, with Dynamo. Call it before any of
    them runs.
    """
    from torch._dynamo.decorators import skip

    skip(knowing_caller(print))


class RecompileLimit:
    """Raises ``torch._dynamo.config.recompile_limit`` by ``num_blocks`` until `restore`. Several instances add up, and
    may end in any order.

    Blocks that share code may each need a variant: a Hugging Face block's access to a key/value cache differs per
    layer. Beyond the limit Dynamo leaves blocks uncompiled, which is slower and rounds differently.
    """

    _ours: ClassVar[int | None] = None
    """The limit that was set here last."""

    def __init__(self, num_blocks: int):
        from torch._dynamo import config

        self._num_blocks = num_blocks
        RecompileLimit._ours = config.recompile_limit = config.recompile_limit + num_blocks

    def restore(self) -> None:
        """Lowers the limit again, unless it was set elsewhere since."""
        from torch._dynamo import config

        if config.recompile_limit == RecompileLimit._ours:
            RecompileLimit._ours = config.recompile_limit = config.recompile_limit - self._num_blocks


class ElementwiseRecomputation:
    """Compiled backward graphs recompute elementwise operations, until `restore` of the last instance.

    AOTAutograd saves whatever backward writes to memory, for instance an activation function's result that the gradient
    of a weight needs. Recomputed in the kernel that reads the same operands anyway, a Llama layer saves a third less.
    """

    _OPTION = "ban_recompute_materialized_backward"
    _num_instances: ClassVar[int] = 0
    _before: ClassVar[bool | None] = None
    """The user's setting; None: this PyTorch has no such option."""

    def __init__(self) -> None:
        from torch._functorch import config

        cls = ElementwiseRecomputation
        if cls._num_instances == 0:
            cls._before = getattr(config, cls._OPTION, None)
            if cls._before is not None:
                setattr(config, cls._OPTION, False)
        cls._num_instances += 1

    def restore(self) -> None:
        """Ends this instance's need."""
        from torch._functorch import config

        cls = ElementwiseRecomputation
        cls._num_instances -= 1
        if cls._num_instances == 0 and cls._before is not None:
            setattr(config, cls._OPTION, cls._before)


def compiler_of_caller(caller: Any) -> Compiler | None:
    """The compiler that ``caller`` of :func:`knowing_caller` identifies."""
    if not callable(caller):
        return None
    from torch._dynamo.eval_frame import _TorchDynamoContext

    return compiler_of_context(_TorchDynamoContext(caller))


def check_no_compiled_autograd() -> None:
    """Raises StateError if compiled autograd is on: compiled backward nodes would not report when they run."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.compiled_autograd_enabled:
        raise _C.StateError(
            "compiled autograd is on (torch._dynamo.config.compiled_autograd or compiled_autograd._enable), which "
            "compiles backward as a whole and so hides when it uses which parameter; leave it off, compiled modules "
            "have a compiled backward without it"
        )


def _compiler_of_function(compiled: Callable[..., Any]) -> Compiler:
    context = _context_of(compiled)
    if context is None:  # made by other means: called unchanged
        return Compiler(compile=lambda function: function, one_graph=True)
    return compiler_of_context(context)


def compiler_of_context(context: Any) -> Compiler:
    """The compiler of a wrapper's ``dynamo_ctx``."""
    return Compiler(compile=context, one_graph=_is_one_graph(context), cuda_graphs=_records_cuda_graphs(context))


def _context_of(compiled: Callable[..., Any]) -> Any:
    """The context that made ``compiled``, found in its closure."""
    from torch._dynamo.eval_frame import _TorchDynamoContext

    for function in (compiled, getattr(compiled, "get_compiler_config", None)):
        for cell in getattr(function, "__closure__", None) or ():
            if isinstance(cell.cell_contents, _TorchDynamoContext):
                return cell.cell_contents
    return None


def _inner(callback: Any) -> Any:
    """The callback or backend that ``callback`` wraps, or None."""
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

"""The compiled modules of one engine, from before it was opened or compiled later."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.module.compiled.door import get_call, set_call
from patrickstar.module.compiled.dynamo import (
    Compiler,
    ElementwiseRecomputation,
    RecompileLimit,
    compiler_of_caller,
    is_wrapper,
    keep_out_of_graphs,
    unwrapped,
)
from patrickstar.module.compiled.regions import Cut, Region, cut_compiled, cut_for
from patrickstar.module.compiled.unit import CompiledUnit
from patrickstar.module.hooks import ModuleHooks
from patrickstar.module.observer import Observer

_CALL = "call"
_FORWARD = "forward"


class CompiledUnits:
    """Puts a `CompiledUnit` around the call of each `Region`; `restore` removes them.

    Args:
        module: the user's module, with its parameters in chunks.
        hooks: the hooks on its modules; modules inside a unit have none.
        observer: receives uses.
    """

    def __init__(self, module: nn.Module, hooks: ModuleHooks, observer: Observer):
        keep_out_of_graphs()
        self._module = module
        self._names = {child: name for name, child in module.named_modules()}
        self._hooks = hooks
        self._observer = observer
        self._units: dict[nn.Module, CompiledUnit] = {}
        self._limit: RecompileLimit | None = None
        self._recomputation: ElementwiseRecomputation | None = None
        self._before: dict[tuple[nn.Module, str], Any] = {}
        """Former values: the function that a module's call runs (``get_call``), and a wrapper's ``forward``."""
        self._follow(cut_compiled(module))

    @property
    def is_compiled(self) -> bool:
        """True if the module or a part of it runs compiled."""
        return bool(self._units)

    @property
    def names(self) -> list[str]:
        """Names of the compiled modules."""
        return sorted(self._names.get(module, "") for module in self._units)

    def compile(self, module: nn.Module, compiler: Compiler) -> None:
        """Compiles ``module``, or the regions in it, from its next call on. Modules inside a region that is compiled
        already are left alone.

        Raises:
            ValueError: ``compiler`` is not supported.
        """
        check_compiler(compiler, f"the {type(unwrapped(module)).__name__}")
        if any(module is not unit.module and module in set(unit.module.modules()) for unit in self._units.values()):
            return
        for inner in module.modules():
            self._restore(inner)
            self._units.pop(inner, None)
        self._follow(cut_for(module, compiler))

    def note_caller(self, caller: Any) -> None:
        """Compiles the module like the compiled function that calls it for training. This happens once."""
        if self._units or not torch.is_grad_enabled():
            return
        compiler = compiler_of_caller(caller)
        if compiler is not None and not compiler.cuda_graphs:
            self.compile(self._module, compiler)

    def restore(self) -> None:
        """Restores the modules."""
        for module, _ in list(self._before):
            self._restore(module)
        self._units.clear()
        self._configure_compiler()

    def _follow(self, cut: Cut) -> None:
        for module in cut.whole:
            self._uncompile(module)
        for region in cut.regions:
            if any(isinstance(param, ChunkedParameter) for param in region.module.parameters()):
                self._install(region)
        self._configure_compiler()
        self._hooks.leave_out({child for unit in self._units.values() for child in unit.module.modules()})

    def _configure_compiler(self) -> None:
        if self._limit is not None:
            self._limit.restore()
        self._limit = RecompileLimit(len(self._units)) if self._units else None
        if self._units and self._recomputation is None:
            self._recomputation = ElementwiseRecomputation()
        if not self._units and self._recomputation is not None:
            self._recomputation.restore()
            self._recomputation = None

    def _install(self, region: Region) -> None:
        module = region.module
        if not region.compiled:
            run = region.compiler.compile(_caller(module, self._names[module]))
        else:
            run = module._call_impl if is_wrapper(module) else get_call(module)
        self._before.setdefault((module, _CALL), get_call(module))
        self._units[module] = unit = CompiledUnit(module, run, self._observer)
        set_call(module, unit)

    def _uncompile(self, module: nn.Module) -> None:
        if is_wrapper(module):
            self._before.setdefault((module, _FORWARD), module.__dict__[_FORWARD])
            module.__dict__[_FORWARD] = module._orig_mod.__call__
        else:
            self._before.setdefault((module, _CALL), get_call(module))
            set_call(module, None)

    def _restore(self, module: nn.Module) -> None:
        if (module, _CALL) in self._before:
            set_call(module, self._before.pop((module, _CALL)))
        if (module, _FORWARD) in self._before:
            module.__dict__[_FORWARD] = self._before.pop((module, _FORWARD))


def _caller(module: nn.Module, name: str) -> Callable[..., Any]:
    """The function that is compiled for a region: the module's call.

    Dynamo keeps compiled code per code object, and only a few variants of it. So each class has its own code object,
    and each list of blocks too: blocks of a list share compiled code, and others do not use up their variants.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    code = _code_for(type(module), re.sub(r"\d+", "*", name), call.__code__)
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


@functools.lru_cache(maxsize=1024)
def _code_for(kind: type[nn.Module], place: str, code: types.CodeType) -> types.CodeType:
    return code.replace(co_name=f"call_{kind.__name__}")


def check_compiled(module: nn.Module) -> None:
    """Raises ValueError if ``module`` or a submodule is compiled in an unsupported way."""
    for region in cut_compiled(module).regions:
        if any(True for _ in region.module.parameters()):
            check_compiler(region.compiler, f"the {type(unwrapped(region.module)).__name__}")


def check_compiler(compiler: Compiler, subject: str) -> None:
    """Raises ValueError if ``compiler`` is not supported for ``subject``."""
    if compiler.cuda_graphs:
        raise ValueError(
            f"{subject} is compiled with CUDA graphs (mode 'reduce-overhead' or 'max-autotune', options "
            "{'triton.cudagraphs': True}, backend 'cudagraphs'), in which addresses of parameters stand, but chunks "
            "move; compile with mode 'default' or 'max-autotune-no-cudagraphs'"
        )

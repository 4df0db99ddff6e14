"""The engine's view of the user's module: calls, names, values, compilation."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.module.compiled.dynamo import Compiler, knowing_caller, make_compiler, unwrapped
from patrickstar.session.session import Session
from patrickstar.session.step_loop import StepLoop
from patrickstar.state.whole_values import load_whole_state, own_state, whole_state


class ModuleFace(nn.Module):
    """An ``nn.Module`` that forwards to the user's, available as ``module``."""

    def __init__(self, session: Session):
        super().__init__()
        self.module = session.module
        self._session = session
        self._loop = StepLoop(session)
        session.owner.face = weakref.ref(self)
        self._call = knowing_caller(self._call_module)

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        return self._session.device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls :attr:`module`.

        Tensors in tuples, lists and dicts are moved to the engine's device, and floating point ones cast to the compute
        dtype.
        """
        return self._call(*args, **kwargs)

    def _call_module(self, caller: Any, *args: Any, **kwargs: Any) -> Any:
        self._session.check_open()
        if caller is not None:
            self._session.compiled.note_caller(caller)
        return self.module(*args, **kwargs)

    def compile(  # type: ignore[override]
        self,
        backend: str | Callable[..., Any] | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
        **options: Any,
    ) -> None:
        """Compiles the module with ``torch.compile`` from the next forward on, block by block if it repeats blocks
        (docs/guides/compile.md). The module keeps its class; :meth:`close` undoes the compilation.

        Args:
            backend: of ``torch.compile``.
            compile_kwargs: other options of ``torch.compile``, also accepted as keywords.
            schedule: None; DeepSpeed's graph passes do not exist here.
            compiled_autograd_enabled: False.

        Raises:
            ValueError: CUDA graphs, a schedule, or compiled autograd was requested.
            StateError: called within a forward.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ValueError(
                "compile(schedule=..., compiled_autograd_enabled=True) is not supported; leave them out: transfers are "
                "planned from the first step, and compiled modules have a compiled backward"
            )
        options = {**(compile_kwargs or {}), **options}
        compiler = make_compiler(options if backend is None else {"backend": backend, **options})
        if compiler is not None:
            self._loop.compile(self.module, compiler)

    def compile_parts(self, compiler: Compiler) -> None:
        """Compiles each child of a module that is not called itself."""
        for child in self.module.children():
            self._loop.compile(child, compiler)

    @property
    def is_compiled(self) -> bool:
        """True if the module, or a part of it, is compiled."""
        return self._session.compiled.is_compiled

    def full_value(self, param: nn.Parameter) -> torch.Tensor:
        """One parameter's full value as a new CPU tensor, in the dtype of the user's module.

        Collective over all ranks, in the same order.
        """
        self._session.check_open()
        return self._session.states.user_value(param)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters under their original names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's buffers under their original names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> OrderedDict[str, torch.Tensor]:  # type: ignore[override]
        """Full tensors under the module's original names: parameters in float32 on the CPU, buffers as they are.

        Frozen parameters have their compute value. Tied parameters share one tensor. With ``tensor_parallel`` all ranks
        must call it; names and tensors are those before sharding, two-phase updates.
        """
        with self._session.guard("state_dict"):
            self._session.ranks.meet()
            if self._session.matrices.names is not None:
                return whole_state(self._session, prefix)
            return own_state(self._session, prefix, keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads values under the module's original names, of any float dtype and device.

        Raises:
            ValueError: ``assign=True``, which would replace the parameters.
            RuntimeError: keys or shapes do not match, as in ``nn.Module.load_state_dict``.
        """
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) would replace the parameters, whose memory is in chunks; leave assign out"
            )
        if self._session.matrices.names is not None:
            return load_whole_state(self._session, state_dict, strict)
        return self.module.load_state_dict(state_dict, strict=strict)

    def __getattr__(self, name: str) -> Any:
        """Attributes that the engine lacks come from the module: ``generate``, ``save_pretrained``, ``config``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("_"):
                raise
            return getattr(unwrapped(module), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses copies and pickles: an engine owns threads and memory.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "an engine cannot be copied or pickled; copy engine.module, save engine.state_dict(), or call "
            "engine.save_checkpoint(folder)"
        )

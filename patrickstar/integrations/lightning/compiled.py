"""LightningModules compiled by ``torch.compile``.

Lightning unwraps the module and compiles each of its steps as a whole instead. This strategy compiles the modules
inside, and runs the steps uncompiled.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from patrickstar.module.compiled.dynamo import Compiler, compiler_of_context

_CONTEXT = "_compiler_ctx"
_ORIGINAL = "original_"


class CompiledSteps:
    """Removes Lightning's compiled steps from a module; `put_back` restores them."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._context: dict[str, Any] = getattr(module, _CONTEXT)
        self._steps = {
            key.removeprefix(_ORIGINAL): original
            for key, original in self._context.items()
            if key.startswith(_ORIGINAL)
        }
        self._compiled = {name: module.__dict__[name] for name in self._steps}
        module.__dict__.update(self._steps)
        setattr(module, _CONTEXT, None)

    @classmethod
    def of(cls, module: nn.Module | None) -> CompiledSteps | None:
        """The compiled steps of ``module``, or None."""
        return cls(module) if getattr(module, _CONTEXT, None) is not None else None

    @property
    def compiler(self) -> Compiler:
        """The compiler of the steps."""
        return compiler_of_context(self._context["dynamo_ctx"])

    def put_back(self) -> None:
        """Restores the module."""
        self._module.__dict__.update(self._compiled)
        setattr(self._module, _CONTEXT, self._context)

"""A LightningModule that ``torch.compile`` was called on.

Lightning takes the module out again and compiles its steps instead, as a whole each; a strategy of many chunks has the
modules inside compiled, and the steps as they are written.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from patrickstar.module.compiled.dynamo import Compiler, compiler_of_context

_CONTEXT = "_compiler_ctx"
_ORIGINAL = "original_"


class CompiledSteps:
    """What Lightning set on a module for its compiled steps, taken off; `put_back` undoes that."""

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
        """Those of ``module``; None where it has none."""
        return cls(module) if getattr(module, _CONTEXT, None) is not None else None

    @property
    def compiler(self) -> Compiler:
        """What they were compiled with."""
        return compiler_of_context(self._context["dynamo_ctx"])

    def put_back(self) -> None:
        """The module as it was."""
        self._module.__dict__.update(self._compiled)
        setattr(self._module, _CONTEXT, self._context)

"""``param.grad`` of chunked parameters: a copy of the gradient in the chunk, which refuses writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from patrickstar.module.parameter_writes import may_write, written_tensors

if TYPE_CHECKING:
    from patrickstar.module.param_handle import ParamHandle


class GradientReader(Protocol):
    """Interface that reads the gradients of an engine's parameters."""

    def read(self, handle: ParamHandle) -> torch.Tensor | None:
        """The parameter's gradient, in its dtype and on its device; None where plain PyTorch has none.

        Raises:
            RuntimeError: the gradient cannot be read now.
        """

    def retain(self, handle: ParamHandle) -> None:
        """Keeps the gradient readable after each step."""

    def drop(self, handle: ParamHandle) -> None:
        """Hides the gradient, as ``param.grad = None`` does."""


class NoGradients:
    """Reader of a module whose engine is not built yet; there are no gradients."""

    def read(self, handle: ParamHandle) -> torch.Tensor | None:
        """Returns None."""
        return None

    def retain(self, handle: ParamHandle) -> None:
        """Does nothing."""

    def drop(self, handle: ParamHandle) -> None:
        """Does nothing."""


class GradientCopy(torch.Tensor):
    """A copy of a gradient in a chunk. Operations that would write it are refused, since the step would not see the
    change. Results are ordinary tensors; views are ``GradientCopy`` too.
    """

    _patrickstar_name: str

    @staticmethod
    def of(gradient: torch.Tensor, name: str) -> GradientCopy:
        """Wraps ``gradient`` of the parameter ``name``; memory is shared."""
        copy = gradient.as_subclass(GradientCopy)
        copy._patrickstar_name = name
        return copy

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs ``func``, or returns NotImplemented if a ``ChunkedParameter`` among the arguments must handle it."""
        kwargs = kwargs or {}
        if may_write(func) or "out" in kwargs:
            for target in written_tensors(func, args, kwargs):
                if isinstance(target, GradientCopy):
                    raise RuntimeError(_refusal(target._patrickstar_name))
        if not all(issubclass(cls, other) for other in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            source = next((arg for arg in args if isinstance(arg, GradientCopy)), None)
            if source is not None and type(result) is torch.Tensor and _share_memory(result, source):
                return GradientCopy.of(result, source._patrickstar_name)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copies to an ordinary tensor."""
        return memo.setdefault(id(self), self.detach().clone().as_subclass(torch.Tensor))

    def __reduce_ex__(self, protocol: int) -> Any:
        """Pickles as an ordinary tensor."""
        return self.detach().clone().as_subclass(torch.Tensor).__reduce_ex__(protocol)


def check_reader(frame: FrameType, name: str) -> None:
    """Raises RuntimeError if the code in ``frame`` would change the gradient of ``name``: PyTorch's clipping, or
    another optimizer.
    """
    clips = frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad"
    if clips or isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
        raise RuntimeError(f"{_refusal(name)}. Parameters are updated by the optimizer that came with the engine")


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _refusal(name: str) -> str:
    return (
        f"the gradient of {name} is in PatrickStar's chunks, and .grad is a copy: it cannot be changed in place. Clip "
        "by the configuration's 'gradient_clipping' or engine.clip_grad_norm_(max_norm), set a gradient by "
        "patrickstar.utils.safe_set_full_grad(param, value)"
    )

"""Precision under Lightning: the engine computes in 16 bits with float32 masters, and runs backward,
clipping and step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from patrickstar.engine.engine import Engine
from patrickstar.integrations.lightning.package import pl

_DTYPES = {
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
_LIGHTNINGS_OWN = (
    pl.plugins.precision.Precision,
    pl.plugins.precision.HalfPrecision,
    pl.plugins.precision.MixedPrecision,
    pl.plugins.precision.DoublePrecision,
)


class PatrickStarPrecision(pl.plugins.precision.Precision):
    """``"32-true"``; ``"bf16-true"``: bfloat16 parameters, inputs and new tensors; ``"bf16-mixed"`` and ``"16-mixed"``:
    16-bit parameters under ``torch.autocast``, which computes losses in float32.

    In all of them Adam's states and masters are float32. With float16 the engine scales the loss.

    Raises:
        ValueError: another precision.
    """

    def __init__(self, precision: str = "32-true"):
        if precision not in _DTYPES:
            raise ValueError(
                f'precision is "{precision}"; PatrickStar trains in {", ".join(_quoted(_DTYPES))}, all with float32 '
                'values in Adam: give one of them ("16-mixed" for float16)'
            )
        self.precision = precision
        self._engine: Engine | None = None
        self._has_gradients = False

    @classmethod
    def of(cls, plugin: pl.plugins.precision.Precision) -> PatrickStarPrecision:
        """The counterpart of Lightning's own plugin, which the ``Trainer`` makes from ``precision=``.

        Raises:
            ValueError: there is none.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) not in _LIGHTNINGS_OWN:
            raise ValueError(
                f"the precision plugin is a {type(plugin).__name__}, which changes how parameters are held; give "
                f"Trainer(precision=...) one of {', '.join(_quoted(_DTYPES))}"
            )
        return cls(plugin.precision)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of parameters and gradients in forward and backward."""
        return _DTYPES[self.precision]

    def attach(self, engine: Engine | None) -> None:
        """Sets the engine of the run that begins; None when it ends."""
        self._engine = engine
        self._has_gradients = False

    def convert_input(self, data: Any) -> Any:
        """Casts a batch's floating point tensors to the compute dtype with ``"bf16-true"``; else returns it
        unchanged.
        """
        if self.precision != "bf16-true":
            return data
        return apply_to_collection(data, torch.Tensor, self._to_compute)

    def _to_compute(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.compute_dtype) if tensor.is_floating_point() else tensor

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Context around every step of the module."""
        if self.precision.endswith("-mixed"):
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
            with torch.autocast(device_type, self.compute_dtype):
                yield
            return
        if self.precision == "32-true":
            yield
            return
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.compute_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default)

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Runs backward through the engine.

        Raises:
            ValueError: the module overrides ``backward``, or positional arguments are given.
        """
        if type(model).backward is not pl.LightningModule.backward:
            raise ValueError(
                f"{type(model).__name__} overrides backward, which PatrickStar has to run itself; remove the override, "
                "and scale the loss in training_step"
            )
        if args:
            raise ValueError("backward got positional arguments; give them by name, such as retain_graph=True")
        assert self._engine is not None
        self._engine.backward(tensor, **kwargs)
        self._has_gradients = True

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Runs forward and backward (the closure), clipping, and the step."""
        try:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        finally:
            self._has_gradients = False

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        """Makes the coming step clip the global norm to ``clip_val``; 0 or less: as configured.

        Raises:
            ValueError: clipping by value was requested.
        """
        if clip_val <= 0 or not self._has_gradients:  # no gradients: training_step returned None
            return
        check_clip_algorithm(gradient_clip_algorithm)
        assert self._engine is not None
        self._engine.clip_grad_norm_(clip_val)


def check_clip_algorithm(algorithm: Any) -> None:
    """Raises ValueError if ``algorithm`` is ``"value"``."""
    if algorithm is not None and str(getattr(algorithm, "value", algorithm)) == "value":
        raise ValueError(
            'gradient_clip_algorithm is "value"; gradients lie in chunks that are clipped by one factor: leave it out, '
            'which means "norm"'
        )


def _quoted(names: Any) -> list[str]:
    return [f'"{name}"' for name in names]

"""Reads of ``param.grad`` in an open engine, and copies of gradients that stay after a step."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

from patrickstar.config import Speculation
from patrickstar.module.chunked_parameter import ChunkedParameter, is_tied
from patrickstar.module.gradient_reads import check_reader, copy_of
from patrickstar.module.managed import ManagedParams
from patrickstar.module.observer import Observer
from patrickstar.module.param_handle import ParamHandle
from patrickstar.module.param_states import ParamStates


class GradientReads:
    """Answers reads of ``param.grad`` in one engine.

    In plain PyTorch a gradient lasts from its backward to ``zero_grad``. In chunks it lasts until the step, which puts
    the new parameter in its place. So:

    * Between backward and step, ``.grad`` is a copy of the gradient that the step will use: before clipping, and after
      it once ``clip_grad_norm_`` is called.
    * After the step, ``.grad`` is a copy of the gradient that the step used, for parameters with ``retain_grad()``. The
      copy is dropped by ``zero_grad`` and by the next forward or backward. Reads of other parameters raise.

    AdaLoRA reads its adapters' gradients after each step (``update_and_allocate``), so these are retained.

    Several ranks must all read in the same order, and retain the same parameters.

    Args:
        module: the user's, with its parameters in chunks.
        observer: calls this object for reads from now on.
        states: returns gradients.
        managed: parameters that PyTorch keeps; their gradients stay until :meth:`forget`.
        prepare: computes the norm of all gradients, as the step does, and returns their divisor: the loss scale, and
            the clipping that was asked for.
        is_inside: whether a forward or a backward runs.
        got_gradient: returns the ids of parameters that ever got a gradient.
        speculation: with ``"commit"`` backward consumes gradients.
        retained: ids of parameters whose gradients stay after a step; extended here.
    """

    def __init__(
        self,
        module: nn.Module,
        observer: Observer,
        states: ParamStates,
        managed: ManagedParams,
        prepare: Callable[[], float],
        is_inside: Callable[[], bool],
        got_gradient: Callable[[], set[int]],
        speculation: Speculation,
        retained: set[int],
    ):
        self._observer = observer
        self._states = states
        self._managed = managed
        self._prepare = prepare
        self._is_inside = is_inside
        self._got_gradient = got_gradient
        self._commits = speculation is Speculation.COMMIT
        chunked = (param for param in module.parameters() if isinstance(param, ChunkedParameter))
        self._params = {param._patrickstar.id: param for param in chunked if not is_tied(param)}
        self._retained = retained
        if not self._commits:
            self._retained.update(param._patrickstar.id for param in _read_after_steps(module))
        self._after_step: dict[int, torch.Tensor | None] | None = None
        """``.grad`` after a step, by id; None: no step since the last forward, backward or ``zero_grad``."""
        observer.gradients = self

    def read(self, handle: ParamHandle) -> torch.Tensor | None:
        """See ``GradientReader``. Called directly by ``param.grad``."""
        if self._observer.has_gradient(handle):
            if self._commits or self._is_inside():
                raise RuntimeError(self._refusal(handle, "now"))
            check_reader(sys._getframe(2), handle.name)
            gradient = self._copy(handle, self._prepare())
            return None if gradient is None else copy_of(gradient, handle.name)
        if self._after_step is None:
            return None
        if handle.id not in self._after_step and handle.trainable and handle.id in self._got_gradient():
            raise RuntimeError(self._refusal(handle, "any more"))
        return self._after_step.get(handle.id)

    def retain(self, handle: ParamHandle) -> None:
        """See ``GradientReader``.

        Raises:
            RuntimeError: optimizer-in-backward consumes gradients.
        """
        if self._commits:
            raise RuntimeError(self._refusal(handle, "after a step"))
        self._retained.add(handle.id)

    def drop(self, handle: ParamHandle) -> None:
        """See ``GradientReader``."""
        if self._after_step is not None:
            self._after_step[handle.id] = None

    def keep(self, loss_scale: float, clip: float) -> None:
        """Copies retained gradients before a step uses them, multiplied by ``clip``; their norm is known."""
        self._after_step = {}
        for param_id in sorted(self._retained):
            gradient = self._copy(self._params[param_id]._patrickstar, loss_scale)
            self._after_step[param_id] = gradient if gradient is None else gradient.mul_(clip)

    def forget(self) -> None:
        """Drops copies of the last step's gradients; called by ``zero_grad``, forward and backward."""
        if self._after_step is not None:
            self._after_step = None
            self._managed.zero_grad()

    def _copy(self, handle: ParamHandle, loss_scale: float) -> torch.Tensor | None:
        param = self._params[handle.id]
        gradient = self._states.own_gradient(param, loss_scale)
        return None if gradient is None else gradient.to(param.device, handle.dtype)

    def _refusal(self, handle: ParamHandle, when: str) -> str:
        text = f"the gradient of {handle.name} is in PatrickStar's chunks, not in .grad, and cannot be read {when}"
        if self._commits:
            return f'{text}: optimizer.speculation is "commit", which uses it up in backward; set it to "auto"'
        return (
            f"{text}. Read it between the last backward and the step (.grad, or "
            "patrickstar.utils.safe_get_full_grad(param)), or call param.retain_grad() once, which keeps it after each "
            "step; the global norm is model.report()['grad_norm']"
        )


def _read_after_steps(module: nn.Module) -> list[ChunkedParameter]:
    """The adapters of PEFT's AdaLoRA."""
    return [
        param
        for child in module.modules()
        if callable(getattr(type(child), "update_and_allocate", None))
        for name, param in child.named_parameters()
        if "lora_" in name and isinstance(param, ChunkedParameter) and param._patrickstar.trainable
    ]

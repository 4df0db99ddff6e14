"""Steps of optimizers whose parameters are in no engine, in a script that ``patrickstar run`` runs."""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from patrickstar.session.registry import find_session, num_opened_sessions

logger = logging.getLogger("patrickstar")

OF_DEEPSPEED = "write import patrickstar as deepspeed, which has its names (docs/guides/from_deepspeed.md)"
_OF_LIGHTNING = (
    'import patrickstar.integrations.lightning, and give its Trainer strategy="patrickstar" (docs/guides/lightning.md)'
)
OF_A_LOOP = (
    "a Trainer of transformers or TRL, or an Accelerator whose prepare gets model and optimizer, gets one; in another "
    "loop call initialize_engine(lambda: model, 0, config) of patrickstar.runtime, and engine.backward(loss) "
    "(docs/guides/plain_loop.md)"
)
_BY_PACKAGE = {
    "deepspeed": OF_DEEPSPEED,
    "lightning": _OF_LIGHTNING,
    "pytorch_lightning": _OF_LIGHTNING,
}


class OutsideEngineError(RuntimeError):
    """A script trains, and has made no engine."""


@contextlib.contextmanager
def refusing_outside_steps() -> Iterator[None]:
    """Context in which the first step of an optimizer is an error while no engine has been made in it. Once there is
    one, a warning names each optimizer of other parameters.

    Raises:
        OutsideEngineError: see above.
    """
    before = num_opened_sessions()
    known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer in known:
            return
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if params and all(find_session(param) is None for param in params):
            name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            if num_opened_sessions() == before:
                raise OutsideEngineError(f"{name} updates a model that is in no engine: {_remedy()}")
            logger.warning("%s updates %d parameters that are in no engine", name, len(params))
        known.add(optimizer)

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _remedy() -> str:
    """The change that helps, by the packages that call the optimizer's step."""
    frame = sys._getframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in _BY_PACKAGE:
            return _BY_PACKAGE[package]
        frame = frame.f_back  # type: ignore[assignment]
    return OF_A_LOOP

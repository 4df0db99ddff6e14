"""The parts of ``deepspeed.zero`` that scripts use."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from patrickstar.deepspeed.gathered_parameters import GatheredParameters
from patrickstar.deepspeed.param_attributes import ZeroParamStatus

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
]

logger = logging.getLogger("patrickstar")


class Init(contextlib.AbstractContextManager["Init"]):
    """Accepted without effect: the model inside is built in host memory as usual, and sharded by ``initialize``.

    A model that must never be whole in memory is built on the meta device, in a function passed to ``initialize``
    (``model=lambda: ...``), or with ``patrickstar.from_pretrained``. All of DeepSpeed's arguments are accepted.
    """

    def __init__(self, module: Any = None, enabled: bool = True, **accepted: Any):
        if enabled:
            logger.info(
                "zero.Init: the model is built in host memory; to build it piece by piece give initialize a function "
                "that builds it on the meta device"
            )

    def __exit__(self, *error: object) -> None:
        return None


def register_external_parameter(module: Any, parameter: Any) -> None:
    """Accepted without effect: uses of parameters are observed everywhere."""


def unregister_external_parameter(module: Any, parameter: Any) -> None:
    """Accepted without effect, as :func:`register_external_parameter`."""

"""Log output of processes that have set up no logging: to standard error.

Logging that the user has set up is left alone: handlers of the root logger or of the logger ``patrickstar``, and its
level, are unchanged. Without any, Python would show only warnings, and a run's progress would be invisible. So the
first engine of such a process gives the logger a handler and the level INFO. The handler is silent once the root logger
has one, and below WARNING writes only on rank 0.
"""

from __future__ import annotations

import logging
import os
import sys

import torch.distributed as dist

_logger = logging.getLogger("patrickstar")


def show_log() -> None:
    """Shows lines of level INFO, unless logging was set up otherwise. Idempotent."""
    if _logger.hasHandlers():
        return
    handler = _StandardErrorHandler()
    handler.setFormatter(logging.Formatter("patrickstar: %(message)s"))
    _logger.addHandler(handler)
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)


class _StandardErrorHandler(logging.Handler):
    """Writes to the current standard error; above tqdm's bars, if there are any."""

    def filter(self, record: logging.LogRecord) -> bool:
        is_for_me = record.levelno >= logging.WARNING or _rank() == 0
        return is_for_me and not logging.getLogger().handlers and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            bars = sys.modules.get("tqdm")
            if bars is not None:
                bars.tqdm.write(self.format(record), file=sys.stderr)
            else:
                sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK") or 0)

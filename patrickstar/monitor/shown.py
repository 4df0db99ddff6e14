"""Where lines of the log go in a process that has set up no logging: to standard error.

[Note: who sets up logging] The user does, and is then left alone: a handler of the root's or of the logger
``patrickstar``, and its level, are as they were set. Without any, Python would show warnings only, and nobody would see
that a run goes on. So the first engine of such a process gives the logger a handler and the level INFO. The handler
says nothing any more once the root has one, and less than a warning on rank 0 alone.
"""

from __future__ import annotations

import logging
import os
import sys

import torch.distributed as dist

_logger = logging.getLogger("patrickstar")


def show_log() -> None:
    """Lets lines of the level INFO be seen, unless logging was set up otherwise. May be called again."""
    if _logger.hasHandlers():
        return
    handler = _StandardErrorHandler()
    handler.setFormatter(logging.Formatter("patrickstar: %(message)s"))
    _logger.addHandler(handler)
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)


class _StandardErrorHandler(logging.Handler):
    """Writes to what is standard error when a line comes; above tqdm's bars, where there are some."""

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

"""Configures PyTorch's CUDA caching allocator for an engine.

Under a tight limit the allocator's cache breaks into pieces too small for large activations. *Expandable segments* map
memory page by page behind one address range, so freed pages of any block can serve another.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable

import torch

logger = logging.getLogger("patrickstar")

_PROBE_BYTES = 32 * 2**20
_PAGE_BYTES = 20 * 2**20  # granularity of PyTorch's pool for large blocks
_LEAST_BUDGET_BYTES = 2**30
_NOT_WITH = ("expandable_segments", "backend:cudamallocasync", "max_split_size_mb")


class ExpandableSegments:
    """Enables expandable segments until close(), unless ``PYTORCH_CUDA_ALLOC_CONF`` or ``PYTORCH_ALLOC_CONF`` chooses
    otherwise or the driver lacks them.

    ``max_split_size_mb`` counts as a choice: PyTorch releases expandable blocks wrongly with it. Device budgets below 1
    GiB do not use them, because they grow by 20 MiB at a time.

    The setting belongs to the process. Of several open engines the first one chooses, and the last one to close
    restores it.
    """

    _num_open = 0  # active instances

    def __init__(self, device: torch.device, budget_bytes: int):
        self.active = False
        self._configured = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        if (
            device.type != "cuda"
            or budget_bytes < _LEAST_BUDGET_BYTES
            or any(word in self._configured.lower() for word in _NOT_WITH)
        ):
            return
        if ExpandableSegments._num_open > 0:
            self._activate()
            return
        self._set("expandable_segments:True")
        torch.cuda.empty_cache()  # the probe must take new memory
        try:
            torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            pass  # an earlier limit; says nothing about segments
        except RuntimeError as error:
            logger.info("the driver has no expandable segments (%s); large activations need more room", error)
            self._set("expandable_segments:False")
            return
        self._activate()

    def _activate(self) -> None:
        self.active = True
        ExpandableSegments._num_open += 1

    @property
    def rounding_bytes(self) -> int:
        """Bytes that the allocator may reserve beyond its limit: it checks the request, then maps whole pages."""
        return _PAGE_BYTES if self.active else 0

    def keep(self) -> ExpandableSegments:
        """Returns a second handle, which must be closed too; the mode lasts until both are closed."""
        other = copy.copy(self)
        if self.active:
            other._activate()
        return other

    def close(self) -> None:
        """Restores the previous mode of new segments. Idempotent."""
        if not self.active:
            return
        self.active = False
        ExpandableSegments._num_open -= 1
        if ExpandableSegments._num_open == 0:
            with contextlib.suppress(RuntimeError):
                self._set("expandable_segments:False")

    def _set(self, setting: str) -> None:
        _allocator_settings()(",".join(filter(None, (self._configured, setting))))


def _allocator_settings() -> Callable[[str], None]:
    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    return newer if newer is not None else torch.cuda.memory._set_allocator_settings

"""PyTorch's CUDA caching allocator, set up for an engine.

Under a tight limit the allocator's cache ends up in pieces that no large activation fits into. With *expandable
segments* it maps memory page by page behind one range of addresses, so that freed pages of any block serve any other.
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
_PAGE_BYTES = 20 * 2**20  # of PyTorch's pool for large blocks
_LEAST_BUDGET_BYTES = 2**30
_NOT_WITH = ("expandable_segments", "backend:cudamallocasync", "max_split_size_mb")


class ExpandableSegments:
    """Expandable segments while it is open, unless the user chose otherwise in ``PYTORCH_CUDA_ALLOC_CONF`` (or
    ``PYTORCH_ALLOC_CONF``) or the driver does not have them.

    ``max_split_size_mb`` counts as a choice: PyTorch releases expandable blocks wrongly with it. On a small device
    budget they cost more than they save, since they grow by 20 MiB at a time.

    The setting is the process's: of engines that are open at once the first chooses, and the last to close undoes it.
    """

    _num_open = 0  # of those that are active

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
        torch.cuda.empty_cache()  # so that the probe takes new memory
        try:
            torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            pass  # a limit from before; it says nothing about segments
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
        """What the allocator may take beyond its limit: it compares the request, then maps whole pages."""
        return _PAGE_BYTES if self.active else 0

    def keep(self) -> ExpandableSegments:
        """The same, to be closed as well: the mode lasts beyond this one's end, if it is active."""
        other = copy.copy(self)
        if self.active:
            other._activate()
        return other

    def close(self) -> None:
        """New segments are again what they were before. Idempotent."""
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

"""A parameter group's options in the core's types."""

from __future__ import annotations

from patrickstar import _C

CoreOptions = _C.AdamOptions | _C.LionOptions | _C.SgdOptions
"""One parameter group's options in one step (csrc/engine/group_options.h)."""

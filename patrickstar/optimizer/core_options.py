"""A parameter group's options as the core takes them: of one of the types of optimizers."""

from __future__ import annotations

from patrickstar import _C

CoreOptions = _C.AdamOptions | _C.LionOptions | _C.SgdOptions
"""One parameter group in one step (csrc/engine/group_options.h)."""

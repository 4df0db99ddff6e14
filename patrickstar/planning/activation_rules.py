"""The limits by which activations leave the device between forward and backward: of an engine, and of a plan for it.

An engine acts by them (patrickstar/engine/stashed_activations.py, [Note: kept activations]; kept_attention.py,
[Note: kept attention]), and patrickstar/planning/leaving.py plays what it does.
"""

from __future__ import annotations

DEVICE_SHARE = 0.5
"""Of the device's memory: what activations may take before they leave (as csrc/engine/stash.cpp has it)."""
LEAST_SHARE = 4096
"""Tensors of less than the device's memory divided by this stay, so that hooks cost little."""
MOST_LEAVING = 2
"""Tensors whose copies to the host run: so far may the launching thread be ahead of the device."""
FETCHED_AHEAD = 3
"""How many tensors before its use the copy back of one begins."""
LEAST_ATTENTION_TOKENS = 32768
"""Of fewer tokens attention is computed again unless the configuration says "always": host memory is worth more for
updates that start early then, and the link more for chunks.
"""

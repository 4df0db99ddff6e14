"""Values of questions whose flags are left out. Standard library only."""

BATCH = 1
"""Sequences per forward."""
LENGTH = 1024
"""Tokens per sequence."""
LORA_RANK = 16
"""Rank of adapters."""
IMAGE_SIZE = "448x448"
"""Width and height of images in pixels."""

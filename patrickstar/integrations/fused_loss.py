"""The fused loss of Hugging Face causal language models, under its public name."""

from patrickstar.sequence.fused_loss import LateLogits, fuse_loss

__all__ = ["LateLogits", "fuse_loss"]

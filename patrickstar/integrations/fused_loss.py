"""The loss of causal language models of Hugging Face without all logits, under the name that users know."""

from patrickstar.sequence.fused_loss import LateLogits, fuse_loss

__all__ = ["LateLogits", "fuse_loss"]

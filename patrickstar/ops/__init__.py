"""Optimizers under the names that DeepSpeed scripts import."""

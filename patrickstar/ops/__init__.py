"""Optimizers by the names that DeepSpeed scripts import."""

"""Tensor and sequence parallelism of an engine: sharded matrices, sharded sequences, and the proof of rewritten models."""

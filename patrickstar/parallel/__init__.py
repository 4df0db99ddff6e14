"""Tensor and sequence parallelism of an engine: sharded matrices and sequences, and the proof of rewritten models."""

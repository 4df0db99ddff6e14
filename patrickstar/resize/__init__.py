"""Resizing of a running engine: another number of ranks, without a checkpoint."""

"""Checkpoints, weight exports and full state dicts of an engine."""

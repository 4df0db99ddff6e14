"""Optimizer parts without an engine: groups, checks of state dicts, optimizers of parameters outside chunks."""

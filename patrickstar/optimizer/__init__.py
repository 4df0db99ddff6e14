"""Optimizer parts without an engine: parameter groups, checks of state dicts, optimizers of parameters outside chunks."""

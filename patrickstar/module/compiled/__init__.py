"""Modules compiled by ``torch.compile`` within an engine; `CompiledUnit` in unit.py explains how."""

"""Modules compiled by ``torch.compile`` within an engine; [Note: compiled units] in unit.py says how."""

"""Plans without a GPU: uses of a step (``uses``), accesses of chunks (``timeline``), machine rates (``machines``) and
predicted steps (``prediction``).
"""

"""The user's module: placement of its parameters in chunks, observation of their uses, and what stays with PyTorch."""

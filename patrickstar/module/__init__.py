"""The user's module: where its parameters lie, who uses them and when, and what stays with PyTorch."""

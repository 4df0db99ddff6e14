"""Training on several ranks (gloo), compared with one process and with plain PyTorch."""

"""What belongs to Adam and needs no engine: groups, checks of states, PyTorch's own for what stays with it."""

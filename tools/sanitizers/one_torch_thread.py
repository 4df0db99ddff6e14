"""A plugin of pytest's for tools/sanitize.py: PyTorch's operations run on the thread that calls them.

GCC's OpenMP, by which they run on several, orders its threads by futexes and atomics that ThreadSanitizer does not see,
and operations call csrc in them, for memory: each such call would be reported. (OMP_THREAD_LIMIT=1 is no way: PyTorch
2.13 computes wrong numbers where it gets fewer threads than it has asked for.)
"""

import torch


def pytest_sessionstart():
    """After conftest.py, which asks for two threads."""
    torch.set_num_threads(1)

"""A pytest plugin of tools/sanitize.py: PyTorch's operations run on the calling thread.

GCC's OpenMP orders its threads by futexes and atomics that ThreadSanitizer does not see. PyTorch operations call csrc
for memory from those threads, and each call would be reported. (Do not use OMP_THREAD_LIMIT=1: PyTorch 2.13 computes
wrong numbers if it gets fewer threads than requested.)
"""

import torch


def pytest_sessionstart():
    """Runs after conftest.py, which sets two threads."""
    torch.set_num_threads(1)

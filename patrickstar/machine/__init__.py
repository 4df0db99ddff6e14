"""What an engine takes of this machine: device and host memory, threads, PyTorch's allocator."""

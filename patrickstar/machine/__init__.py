"""Resources of the machine: device and host memory, threads, PyTorch's allocator."""

"""Versions that the build, the bootstrap of `make` and CI agree on. This is the only place that names them."""

MINIMUM_PYTHON = (3, 10)
MINIMUM_TORCH = (2, 6)

# What `make` installs, and what the error without PyTorch recommends: the version the tests run with.
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# `make check-cuda` compiles and links the CUDA part against these wheels (tools/check_cuda.py). They belong together:
# the second is what the first depends on, the others make a CUDA compiler where the machine has none.
CUDA_TORCH = "torch==2.11.0"
CUDA_NCCL = "nvidia-nccl-cu13==2.28.9"
CUDA_TOOLKIT_MAJOR = 13
CUDA_TOOLKIT = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)

"""Versions that the build, the bootstrap of `make` and CI agree on. This is the only place that names them."""

MINIMUM_PYTHON = (3, 10)
MINIMUM_TORCH = (2, 6)

# The version that `make` installs, the error without PyTorch recommends, and the tests run with.
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# The supported minor versions of PyTorch: `make wheels` packs a shim for each, compiled against this release's headers.
WHEEL_TORCHES = ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", TORCH, "2.14.1")
# CI installs this one beside TORCH and trains with both from one wheel.
SECOND_TORCH = WHEEL_TORCHES[-1]

# The CUDA part is compiled against these wheels where no PyTorch with CUDA is installed (tools/check_cuda.py, CUDA
# wheels). They belong together: the second is what the first depends on, the others make a CUDA compiler where the
# machine has none. The architectures are the first's.
CUDA_TORCH = "torch==2.11.0"
CUDA_NCCL = "nvidia-nccl-cu13==2.28.9"
CUDA_TOOLKIT_MAJOR = 13
CUDA_ARCHITECTURES = "7.5;8.0;8.6;9.0;10.0;12.0+PTX"
CUDA_TOOLKIT = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)

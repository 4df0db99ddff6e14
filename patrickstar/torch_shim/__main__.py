"""Attaches PyTorch; compiles the shim if there is none."""

import torch

from patrickstar import torch_shim

torch_shim.attach()
print(f"patrickstar: attached to PyTorch {torch.__version__}")

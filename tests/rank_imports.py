"""What the server of ranks imports before it forks them (tests/distributed.py). Importing starts no thread."""

import torch
import transformers.models.gpt2.modeling_gpt2
import transformers.models.t5.modeling_t5

import patrickstar.deepspeed
import patrickstar.runtime
import tests.models

__all__ = ["patrickstar", "tests", "torch", "transformers"]

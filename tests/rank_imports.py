"""Imports of the server that forks ranks (tests/distributed.py). Importing this starts no thread."""

import torch
import transformers.models.gpt2.modeling_gpt2
import transformers.models.t5.modeling_t5

import patrickstar.deepspeed
import patrickstar.runtime
import tests.models

__all__ = ["patrickstar", "tests", "torch", "transformers"]

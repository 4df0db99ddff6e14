"""Imports of the server that forks ranks (tests/distributed.py). Importing this starts no thread."""

import gc

import torch
import transformers.models.gpt2.modeling_gpt2
import transformers.models.t5.modeling_t5

import patrickstar.deepspeed
import patrickstar.runtime
import tests.models

__all__ = ["patrickstar", "tests", "torch", "transformers"]

gc.collect()
gc.freeze()  # a collection in a fork would visit these objects, and so copy their pages

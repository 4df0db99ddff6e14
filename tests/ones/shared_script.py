"""A job whose neighbouring ranks share samples; rank 0 writes the final state.

python shared_script.py FOLDER NUM_STEPS STEP_SECONDS

SHARED in the environment has the sections of the configuration, in JSON; without it each rank has its own samples.
"""

import json
import os
import sys
from pathlib import Path

import torch

from tests.models import LENGTH, VOCAB, gpt2
from tests.ones.elastic_script import NUM_SAMPLES, main


class LanguageModel:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "default_chunk_size": 8192,
        **json.loads(os.environ.get("SHARED", "{}")),
    }

    def build(self):
        torch.manual_seed(1)
        return gpt2()

    def data(self, generator):
        return (torch.randint(1, VOCAB, (NUM_SAMPLES, LENGTH), generator=generator),)

    def loss(self, engine, tokens):
        return engine(input_ids=tokens, labels=tokens).loss


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), LanguageModel())

r"""Plans, and the cost of a step, without a GPU.

    patrickstar plan --model llama-3.1-8b --gpu rtx4090 --host-memory 128GiB --seq-len 2048 --checkpointing

says whether a model fits, its tokens per second, and what bounds the step. It lists changes that would help, with their
gain (each was planned again), and the matching configuration.

    patrickstar plan --model 10.5b --device-memory 24GiB --host-memory 64GiB --checkpointing \\
        --nodes 4 --gpus-per-node 8 --link ib400 --also 8,256

plans many GPUs, each with its own batch and budgets.

    patrickstar plan --model llama-3.1-8b --checkpointing --fused-loss --tile-tokens 4096 --gpus-per-node 2 \\
        --sequence-parallel 2 --longest

finds the longest sequences that one GPU, and two GPUs with context parallelism, can train. ``--tensor-parallel 2x2``
shards matrices over four GPUs; ``auto`` chooses the mesh that sends least.

In programs ``engine.plan()`` returns a running engine's plan. :class:`Plan` saves and loads it, the configuration's
``plan`` starts a new engine with it, and :func:`predict` simulates it.
"""

from __future__ import annotations

import sys

from patrickstar.command.plan import main
from patrickstar.planning.predicted_step import Prediction
from patrickstar.planning.prediction import predict_case
from patrickstar.planning.setting import Setting
from patrickstar.planning.simulation import predict
from patrickstar.planning.step_plan import Plan

__all__ = ["Plan", "Prediction", "Setting", "main", "predict", "predict_case"]

if __name__ == "__main__":
    sys.exit(main())

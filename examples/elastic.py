"""A run that starts on one rank, continues on two, and ends on one, without a checkpoint; on the CPU:

    python examples/elastic.py

This process starts the ranks and serves the rendezvous; a rank's script is :func:`train`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from patrickstar import initialize_engine
from patrickstar.elastic import ElasticLoader, ElasticSampler, Membership, serve_rendezvous

NUM_RANKS = {4: 2, 8: 1}
"""Numbers of ranks by the step from which they apply."""
NUM_STEPS = 12
GLOBAL_BATCH = 8


def build() -> nn.Module:
    """A small regression model."""
    return nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))


def train(joins: str) -> None:
    """The script of a rank; ``joins`` is "yes" for one that joins while the others train."""
    torch.manual_seed(0)
    inputs = torch.randn(GLOBAL_BATCH * NUM_STEPS, 32)
    data = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}, "default_chunk_size": 65536}
    model, optimizer = initialize_engine(build, config=config)
    sampler = ElasticSampler(len(data), GLOBAL_BATCH, max_micro_batch=4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, NUM_STEPS)
    user_state = {"sampler": sampler, "schedule": schedule}
    if joins == "yes":
        model.join(user_state=user_state)
    for micro_batches in ElasticLoader(data, sampler):
        optimizer.zero_grad()
        losses = []
        for batch, target in micro_batches:
            loss = nn.functional.mse_loss(model(batch), target)
            model.backward(loss / len(micro_batches))
            losses.append(loss.item())
        optimizer.step()
        schedule.step()
        step = sampler.cursor // GLOBAL_BATCH
        print(
            f"step {step}, rank {sampler.rank} of {sampler.division.num_ranks}: {len(losses)} micro-batches of "
            f"{sampler.division.micro_batch}, loss {sum(losses) / len(losses):.4f}",
            flush=True,
        )
        if step in NUM_RANKS and NUM_RANKS[step] != sampler.division.num_ranks:
            resized = model.resize(NUM_RANKS[step], user_state=user_state)
            if resized.membership is Membership.LEFT:
                print("this process has left", flush=True)
                return
    model.close()


def main() -> None:
    """Serves the rendezvous and starts one rank, and one that joins."""
    store = serve_rendezvous()
    place = Path(__file__).resolve()
    paths = [str(place.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **store.environment,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    processes = [subprocess.Popen([sys.executable, str(place), joins], env=environment) for joins in ("no", "yes")]
    sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main()

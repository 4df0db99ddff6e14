"""A job that trains a tiny model; rank 0 writes the final state.

python elastic_script.py FOLDER NUM_STEPS STEP_SECONDS

With FAIL_ONCE in the environment a rank kills itself in the middle of the first run. REDUNDANCY is that of the run.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from patrickstar import initialize_engine
from patrickstar.elastic import ElasticLoader, ElasticRun, ElasticSampler, Next
from tests.ones.seen import Notes

GLOBAL_BATCH, NUM_SAMPLES = 12, 120


class Regression:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "default_chunk_size": 4096}

    def build(self):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))

    def data(self, generator):
        inputs = torch.randn(NUM_SAMPLES, 8, generator=generator)
        return inputs, inputs.sin().sum(1, keepdim=True)

    def loss(self, engine, x, y):
        return nn.functional.mse_loss(engine(x), y)


def main(folder, num_steps, step_seconds, task):
    torch.set_num_threads(1)
    data = TensorDataset(torch.arange(NUM_SAMPLES), *task.data(torch.Generator().manual_seed(2)))
    engine, optimizer = initialize_engine(task.build, config=task.config)
    sampler = ElasticSampler(NUM_SAMPLES, GLOBAL_BATCH, 12)
    run = ElasticRun(
        engine,
        {"sampler": sampler},
        checkpoint=folder / "checkpoint",
        checkpoint_seconds=0.5,
        look_seconds=0.1,
        redundancy=int(os.environ["REDUNDANCY"]) if "REDUNDANCY" in os.environ else None,
    )
    seen = Notes(folder)
    while run.num_steps < num_steps:
        for micro_batches in ElasticLoader(data, sampler):
            with run.step():
                optimizer.zero_grad()
                for indices, *batch in micro_batches:
                    loss = task.loss(engine, *batch)
                    engine.backward(loss / len(micro_batches))
                    if run.rank % engine.ranks_per_sample == 0:  # one of the ranks that share samples
                        seen.add(run.num_steps, run.num_lost, loss.item(), indices.tolist())
                optimizer.step()
                time.sleep(step_seconds)
                run.step_done(loss.item())
            if run.next is not Next.TRAIN:
                return
            if "FAIL_ONCE" in os.environ and run.num_steps > num_steps // 2 and not (folder / "failed").exists():
                (folder / "failed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if run.num_steps == num_steps:
                break
    run.end()
    values = {name: value.tolist() for name, value in engine.state_dict().items()}
    if run.rank == 0:
        (folder / "result.json").write_text(json.dumps({"num_steps": run.num_steps, "values": values}))
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Regression())

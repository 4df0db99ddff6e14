"""A job whose global batch may change; rank 0 writes its effective batches and the final values.

python batch_script.py FOLDER NUM_SAMPLES STEP_SECONDS
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

from patrickstar import initialize_engine
from patrickstar.elastic import ElasticLoader, ElasticRun, ElasticSampler, Next, ScaledRates, job_batch
from tests.elastic import runs
from tests.elastic.batch_runs import MICRO_BATCH, SEED, config
from tests.ones.seen import Notes

LR = 1e-3  # rounding errors grow little in some hundred steps


class History:
    """Batches of all steps that count, across kills, as user state."""

    def __init__(self):
        self.batches = []

    def state_dict(self):
        return {"batches": list(self.batches)}

    def load_state_dict(self, state):
        self.batches = list(state["batches"])


def main(folder, num_samples, step_seconds):
    torch.set_num_threads(1)
    engine, optimizer = initialize_engine(runs.build, config=config(LR))
    sampler = ElasticSampler(runs.NUM_SAMPLES, job_batch(), MICRO_BATCH, seed=SEED)
    rates, history, seen = ScaledRates(optimizer, job_batch()), History(), Notes(folder)
    run = ElasticRun(
        engine,
        {"sampler": sampler, "rates": rates, "history": history},
        checkpoint=folder / "checkpoint",
        checkpoint_seconds=0.5,
        look_seconds=0.1,
        redundancy=1,
    )
    while run.num_samples < num_samples:
        for micro_batches in ElasticLoader(runs.samples(), sampler):
            with run.step():
                optimizer.zero_grad()
                for indices, inputs, targets in micro_batches:
                    loss = nn.functional.mse_loss(engine(inputs), targets)
                    engine.backward(loss / len(micro_batches))
                    seen.add(run.num_steps, run.num_lost, loss.item(), indices.tolist())
                optimizer.step()
                rates.step()
                history.batches.append(sampler.global_batch)
                time.sleep(step_seconds)
                run.step_done(loss.item())
            if run.next is not Next.TRAIN:
                return
            if run.num_samples >= num_samples:
                break
    run.end()
    values = {name: value.tolist() for name, value in engine.state_dict().items()}
    if run.rank == 0:
        (folder / "result.json").write_text(json.dumps({"values": values, "batches": history.batches}))
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

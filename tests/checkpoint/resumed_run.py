"""Trains with all state that a checkpoint keeps and prints digests of that state as JSON.

python -m tests.checkpoint.resumed_run '{"precision": "fp16", "load": "folder", "steps": 3}'
"""

import hashlib
import json
import random
import sys
from typing import Any

import numpy as np
import torch

from patrickstar.runtime import initialize_engine
from tests.models import LENGTH, VOCAB, gpt2
from tests.training import make_config

CLIENT_STATE = {"epoch": 3, "best": float("inf"), "shape": (2, 16), 7: [True, None, "x"]}


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, VOCAB, (2, LENGTH)) + int(np.random.randint(VOCAB)) + random.randrange(VOCAB)
    tokens = tokens % (VOCAB - 1) + 1
    return {"input_ids": tokens, "labels": tokens.clone()}


def digest(values: Any) -> str:
    total = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            total.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                total.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            total.update(repr(value).encode())

    add(values)
    return total.hexdigest()


def run(
    precision: str, steps: int, load: str | None = None, save_at: int = -1, save: str = "", **config: Any
) -> dict[str, Any]:
    seed = 0 if load is None else 99
    for seeded in (torch.manual_seed, np.random.seed, random.seed):
        seeded(seed)
    config = make_config(precision, gradient_clipping=0.5, **config)
    if precision == "fp16":
        config["fp16"] |= {"initial_scale_power": 24, "loss_scale_window": 2}
    groups = [{"params": "*bias", "weight_decay": 0.0}, {"params": "*", "betas": (0.8, 0.95)}]
    engine, optimizer = initialize_engine(lambda: gpt2(dropout=0.1), 0, config, model_parameters=groups)
    with engine:
        engine.train()
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5, 7], gamma=0.5)
        client_state = None
        if load is not None:
            client_state = engine.load_checkpoint(load, lr_scheduler=scheduler)[1]
        losses = []
        for step in range(steps):
            if step == save_at:
                engine.save_checkpoint(save, client_state=CLIENT_STATE, lr_scheduler=scheduler)
            loss = engine(**batch()).loss
            engine.backward(loss)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item().hex())
            if step + 1 == save_at:
                skipped = not engine._session.outcome.applied
        result = {
            "losses": losses,
            "parameters": digest(engine.state_dict()),
            "optimizer": digest(optimizer.state_dict()),
            "scale": engine.report()["loss_scale"],
            "scheduler": repr(sorted(scheduler.state_dict().items())),
            "random": [torch.rand(1).item(), float(np.random.rand()), random.random()],
            "gauss": [float(np.random.randn()), random.gauss(0, 1)],
            "num_steps": engine._session.num_steps,
            "evictions": engine.report()["num_evictions"],
        }
        if save_at >= 0:
            result["skipped_before_saving"] = skipped
        if client_state is not None:
            result["client_state_is_right"] = client_state == CLIENT_STATE
        return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([run(**arguments) for arguments in json.loads(sys.argv[1])]))

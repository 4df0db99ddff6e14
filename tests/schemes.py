"""Schemes of updates (rule, type of states, master) and the scenarios that all of them pass, on a simulated device or a
GPU.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from patrickstar.runtime import initialize_engine
from tests.models import Case, gpt2, token_batch
from tests.training import ADAM, Run, assert_same, make_config, num_committed, taken_over, train, two_passes

PARAMS = {
    "AdamW": ADAM,
    "Adam": ADAM,
    "Lion": {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "Nesterov": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
}
STEPS = 4


def config_of(
    rule="AdamW", states="fp32", master="exact", *, precision="bf16", on_device=True, speculation="auto", **more
) -> dict[str, Any]:
    config = make_config(precision, **more)
    kind = "SGD" if rule == "Nesterov" else rule
    params = {**PARAMS[rule], "use_hybrid_adam": on_device}
    config["optimizer"] = {"type": kind, "params": params, "speculation": speculation, "states": states}
    if master != "exact":
        config["optimizer"]["master"] = master
    return config


@dataclasses.dataclass
class Room:
    """A model, and the bytes of device memory in which ``config`` is scarce."""

    case: Case
    scarce: Callable[[dict[str, Any]], int]
    chunk: int = 64 * 1024
    small_chunk: int = 4096

    def train(self, scheme, **more) -> Run:
        steps = more.pop("steps", STEPS)
        accumulate = more.pop("accumulate", 1)
        config = config_of(*scheme, **{"default_chunk_size": self.chunk, **more})
        return train(self.case, config, steps=steps, accumulate=accumulate)

    def scarce_bytes(self, scheme, **more) -> int:
        return self.scarce(config_of(*scheme, **{"default_chunk_size": self.chunk, **more}))


def check_waiting(room: Room, scheme, **more) -> None:
    """Updates that wait for the norm: the same bits on either side, in any budget and chunks."""
    roomy = room.train(scheme, speculation="never", **more)
    assert roomy.report["num_device_state_chunks"] == roomy.report["num_chunks"]
    scarce = room.scarce_bytes(scheme, **more)
    for placement in (
        {"device_memory": scarce},
        {"on_device": False, "default_chunk_size": room.small_chunk},
        {"on_device": False, "speculation": "always", "device_memory": 2 * scarce},
    ):
        run = room.train(scheme, **{**more, **placement})
        assert run.report["num_device_state_chunks"] == 0 or placement.get("on_device", True)
        assert run.grad_norms == roomy.grad_norms
        assert_same(run, roomy)


def check_committed(room: Room, scheme, **more) -> Run:
    """Updates within backward: all of them, and the same bits on either side, in any budget and chunks."""
    more = {"speculation": "commit", **more}
    roomy = room.train(scheme, **more)
    scarce = room.scarce_bytes(scheme, on_device=False, **more)
    for placement in (
        {"on_device": False},
        {"on_device": False, "default_chunk_size": room.small_chunk, "device_memory": scarce},
        {"device_memory": 2 * scarce, "delays": {"max_random_us": 500, "seed": 1}},
    ):
        run = room.train(scheme, **{**more, **placement})
        assert num_committed(run.report) == STEPS * run.report["num_chunks"]
        assert_same(run, roomy)
    return roomy


def check_clipping_that_always_acts(room: Room, scheme) -> None:
    roomy = room.train(scheme, speculation="never", gradient_clipping=1e-3)
    run = room.train(scheme, on_device=False, speculation="always", gradient_clipping=1e-3)
    assert run.report["num_scale_independent_updates"] > 0
    assert two_passes(run.report) > 0
    assert_same(run, roomy)


def check_taken_over(room: Room, scheme, precision) -> None:
    roomy = room.train(scheme, precision=precision, speculation="never")
    ahead = {"on_device": False, "speculation": "always", "default_chunk_size": room.small_chunk}
    run = room.train(scheme, precision=precision, **ahead)
    assert taken_over(run.report) > 0
    assert_same(run, roomy)


def frozen() -> torch.nn.Module:
    model = gpt2()
    model.transformer.wte.requires_grad_(False)
    model.transformer.h[0].requires_grad_(False)
    return model


def unfreeze_in_the_third_step(config):
    """Losses, values and optimizer states after five steps."""
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(frozen, 0, config)
    losses = []
    with engine:
        before = {
            name: engine.state_dict()[name] for name, p in engine.module.named_parameters() if not p.requires_grad
        }
        generator = torch.Generator().manual_seed(0)
        for step in range(5):
            if step == 2:
                engine.module.requires_grad_(True)
            loss = engine(**token_batch(generator))["loss"]
            losses.append(loss.item())
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        values = engine.state_dict()
        assert any((values[name] != value).any() for name, value in before.items())
        return losses, values, optimizer.state_dict()["state"]

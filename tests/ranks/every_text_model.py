import math
import os
from typing import Any

import torch
import torch.distributed as dist

from patrickstar import RankFailure
from patrickstar.runtime import initialize_engine
from tests.text_models import FIRST_WORD, VOCAB, build
from tests.training import make_config

ROWS, LENGTH = 2, 16
LEARNING_RATE = 0.01
_PADDED = 3


def batches() -> list[dict[str, Any]]:
    """Two batches: tokens alone; padding within a sequence and on the left of another one."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        tokens = torch.randint(FIRST_WORD, VOCAB, (ROWS, LENGTH), generator=generator)
        labels = tokens.clone()
        labels[torch.rand(tokens.shape, generator=generator) < 0.3] = -100
        found.append({"input_ids": tokens, "labels": labels, "use_cache": False})
    mask = torch.ones_like(tokens)
    mask[1, :_PADDED] = 0
    tokens[1, :_PADDED] = 1
    tokens[0, 2] = 1
    labels[1, : _PADDED + 1] = -100
    found[1]["attention_mask"] = mask
    return found


def train_plainly(name: str) -> tuple[list[float], list[float]]:
    model = build(name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def train_shared(name: str, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    config = make_config("fp32", gradient_clipping=1e9, steps_per_print=0)
    config["optimizer"] = {"type": "SGD", "params": {"lr": LEARNING_RATE}}
    engine, optimizer = initialize_engine(lambda: build(name), 0, {**config, **options})
    losses, norms = [], []
    with engine:
        engine.train()
        for batch in batches():
            loss = engine(**batch).loss
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            norms.append(engine.report()["grad_norm"])
    return losses, norms


def try_all(names: list[str], ways: list[dict[str, Any]]) -> list[list[str]]:
    """By model "right", "refused: ..." with the error, or the difference; for each of ``ways``, options of an
    engine.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    outcomes = [[_try(name, options) for name in names] for options in ways]
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return outcomes


def _gap(found: list[float], expected: list[float]) -> float:
    """The largest relative difference. NaN equals NaN: Gemma 3n has no gradient for the zeros of a padding token."""
    pairs = [pair for pair in zip(found, expected, strict=True) if not all(map(math.isnan, pair))]
    gaps = [abs(one / other - 1) for one, other in pairs]
    return math.inf if any(map(math.isnan, gaps)) else max(gaps)


def _try(name: str, options: dict[str, Any]) -> str:
    try:
        losses, norms = train_shared(name, options)
    except (ValueError, RankFailure) as error:  # the other rank's may have come first
        return f"refused: {error}"
    expected_losses, expected_norms = train_plainly(name)
    gaps = [_gap(losses, expected_losses), _gap(norms, expected_norms)]
    is_right = gaps[0] <= 1e-5 and gaps[1] <= 1e-4
    return "right" if is_right else f"wrong: losses by {gaps[0]:.1e}, norms of gradients by {gaps[1]:.1e}"

"""Checkpoints of sharded chunks: any ranks write them, any others load them, and training goes on to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.models import MODELS
from tests.ranks.runs import rank_and_size, rows
from tests.ranks.test_training import assert_same_state
from tests.training import make_config


def train_part(
    folder: str | None, begin: int, end: int, save_to: str | None, precision: str = "bf16", **options: Any
) -> dict[str, Any]:
    """Steps ``begin`` to ``end`` of a run, from a checkpoint if there is one; saves at the end if told to."""
    case = MODELS["gpt2"]
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(case.build, 0, make_config(precision, gradient_clipping=1.0, **options))
    with engine:
        engine.train()
        if folder is not None:
            engine.load_checkpoint(folder)
        loaded = engine.state_dict()
        generator = torch.Generator().manual_seed(1)
        losses = []
        for step in range(end):
            batch = rows(case.batch(generator))
            if step < begin:
                continue
            optimizer.zero_grad()
            loss = case.loss(engine(**batch))
            engine.backward(loss)
            losses.append(loss.item())
            optimizer.step()
        if save_to is not None:
            engine.save_checkpoint(save_to, client_state={"step": end})
            engine.export_weights(Path(save_to, "weights"))
        states = {}
        for name, param in engine.named_parameters():
            for key, value in optimizer.state[param].items():
                states[f"{name} {key}"] = value
        return {"losses": losses, "loaded": loaded, "state": engine.state_dict(), "states": states}


def part_on_small_device(folder: str, begin: int, end: int, save_to: str | None) -> dict[str, Any]:
    return train_part(folder, begin, end, save_to, device_memory="1MB", default_chunk_size=16384)


def test_two_ranks_go_on_where_they_were(tmp_path):
    straight = run_ranks(2, train_part, None, 0, 6, None)
    first = run_ranks(2, train_part, None, 0, 3, str(tmp_path))
    then = run_ranks(2, part_on_small_device, str(tmp_path), 3, 6, None)
    for rank in range(2):
        assert straight[rank]["losses"] == first[rank]["losses"] + then[rank]["losses"]
        assert_same_state(straight[rank]["state"], then[rank]["state"])
        assert_same_state(straight[rank]["states"], then[rank]["states"])


def test_another_number_of_ranks(tmp_path):
    """1, 2, 4 and 1 ranks: what is stored stays the same to the bit; so do exported weights."""
    folders = [str(tmp_path / name) for name in ("one", "two", "four")]
    one = run_ranks(1, train_part, None, 0, 3, folders[0])[0]
    two = run_ranks(2, train_part, folders[0], 0, 0, folders[1])
    four = run_ranks(4, train_part, folders[1], 0, 0, folders[2])
    again = run_ranks(1, train_part, folders[2], 0, 0, None)[0]
    for result in (*two, *four, again):
        assert_same_state(one["state"], result["loaded"])
        assert_same_state(one["states"], result["states"])
    assert rank_and_size() == (0, 1)
    for folder in folders:
        weights = load_file(Path(folder, "weights", "model.safetensors"))
        assert weights
        for name, value in weights.items():
            assert_same_bits(value, one["state"][name].to(value.dtype), name)

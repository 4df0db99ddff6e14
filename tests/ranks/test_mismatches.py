"""Every ordered pair of different calls at one point of a run: all ranks end with an error that names each rank's call.

One set of processes runs the pairs of a group, and groups run beside each other, since most time goes by in waiting.
"""

import datetime
import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from patrickstar.ranks import failures as rank_failures
from patrickstar.runtime import initialize_engine
from tests.distributed import run_ranks
from tests.training import make_config

pytestmark = pytest.mark.slow

EXCHANGES = {
    "forward": ["forward"],
    "backward": ["backward"],
    "step": ["step"],
    "zero_grad": [],
    "state_dict": ["state_dict"],
    "save_checkpoint": ["save_checkpoint"],
    "close": ["close"],
    "evaluation forward": ["evaluation forward"],
    "one batch fewer": [],
    "one batch more": ["forward", "backward", "step"],
}
"""Calls in which a rank may wait for the others, by its own call."""
PAIRS = list(itertools.product(EXCHANGES, EXCHANGES))
NUM_GROUPS = 5
SAVED_TOO_EARLY = "save_checkpoint between backward and step"
_RANK_IN = re.compile(r"rank (\d) (?:is )?in ([a-z_ ]+) of step")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def make_calls(pairs: list[tuple[str, str]], folder: str) -> list[str]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank_failures._LINGER_SECONDS = rank_failures._GRACE_SECONDS = 0.3  # the store's server stays
    rank_failures._BEAT_SECONDS = 0.25
    errors = []
    for calls in pairs:
        try:
            run(calls[min(rank, 1)], calls, folder)
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    dist.destroy_process_group()
    return errors


def run(call: str, calls: tuple[str, ...], folder: str) -> None:
    torch.manual_seed(0)
    config = make_config("fp32", default_chunk_size=8192, rank_timeout_seconds=60)
    engine, optimizer = initialize_engine(lambda: Layers(), 0, config)
    with engine:
        x = torch.ones(2, 32)

        def step() -> None:
            engine.backward(engine(x))
            optimizer.step()

        for _ in range(2):
            step()
        if "step" in calls:  # of gradients
            engine.backward(engine(x))
        loss = engine(x) if "backward" in calls else None
        if call == "forward":
            engine(x)
        elif call == "backward":
            engine.backward(loss)
        elif call == "step":
            optimizer.step()
        elif call == "zero_grad":
            engine.zero_grad()
        elif call == "state_dict":
            engine.state_dict()
        elif call == "save_checkpoint":
            engine.save_checkpoint(folder)
        elif call == "close":
            engine.close()
            return
        elif call == "evaluation forward":
            with torch.no_grad():
                engine(x)
        elif call == "one batch more":
            step()
        engine.state_dict()


def left(call: str) -> list[str]:
    return EXCHANGES[call] if call == "close" else [*EXCHANGES[call], "state_dict", "close"]


def check(calls: tuple[str, str], errors: tuple[str, ...]) -> None:
    by_rank = [left(calls[min(rank, 1)]) for rank in range(len(errors))]
    if by_rank[0] == by_rank[1]:
        assert not any(errors)
        return
    together = next(i for i, (one, other) in enumerate(zip(*by_rank[:2], strict=False)) if one != other)
    for rank, error in enumerate(errors):
        if set(calls) == {"step", "save_checkpoint"}:
            own = "StateError: " if calls[min(rank, 1)] == "save_checkpoint" else "RankFailure: "
            if error.startswith(own) and SAVED_TOO_EARLY in error:
                continue
        assert "RankMismatch: " in error  # or who found it told this rank
        named = dict(_RANK_IN.findall(error.partition("; at that time: ")[0]))  # heartbeats may come late
        assert named.keys() == set(map(str, range(len(errors))))
        assert len(set(named.values())) > 1
        for other, call in named.items():
            assert call in by_rank[int(other)][together:]


def check_all(num_ranks: int, pairs: list[tuple[str, str]], folder: str) -> None:
    def run_group(group: list[tuple[str, str]]) -> list[list[str]]:
        return run_ranks(num_ranks, make_calls, group, folder, timeout_seconds=300)

    num_groups = min(NUM_GROUPS, len(pairs) // 5)
    groups = [pairs[index::num_groups] for index in range(num_groups)]
    with ThreadPoolExecutor(num_groups) as pool:
        for group, by_rank in zip(groups, pool.map(run_group, groups), strict=True):
            for calls, errors in zip(group, zip(*by_rank, strict=True), strict=True):
                print(calls, errors)
                check(calls, errors)


def test_every_pair_of_calls_on_two_and_on_three_ranks(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(check_all, size, PAIRS, str(tmp_path / str(size))) for size in (2, 3)]
    for run_of_size in runs:
        run_of_size.result()

"""Devices that a plan fills to the last byte. As with CUDA, buffers are larger than their content."""

from typing import Any

import torch
import torch.distributed as dist

from patrickstar.runtime import initialize_engine
from patrickstar.session import core_setup
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.models import gpt2
from tests.training import make_config

STEPS = 5
SLOW = {"delays": {"link_gbps": 0.01, "link_latency_us": 5}}
"""A link so slow that the host's updates are late, and so is memory for more gradients."""
FULL = [
    {"device_memory": 7_300_000, "host_memory": 5_000_000} | SLOW,
    {"device_memory": 6_500_000, "host_memory": 5_500_000},
]
"""Bytes on each of two ranks, for 2.4 M parameters of 6.03 bytes: 7.2 MB beside 1.6 MB of activations."""


def train(config: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any], int]:
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(lambda: gpt2(hidden=128, layers=12), 0, config)
    losses = []
    with engine:
        engine.train()
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            before = engine.report()["downloaded_bytes"]
            tokens = torch.randint(0, 32, (1, 16), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens)["loss"]
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        report = engine.report()
        return losses, engine.state_dict(), report, report["downloaded_bytes"] - before


def train_all() -> list[Any]:
    dist.init_process_group("gloo")
    make_options = core_setup.make_engine_options

    def make_options_as_on_cuda(*args: Any) -> Any:
        options = make_options(*args)
        options.device.follows_activations = False
        return options

    core_setup.make_engine_options = make_options_as_on_cuda  # this process is the test's own
    config = make_config("bf16", default_chunk_size=65536)
    config["optimizer"] |= {"speculation": "commit", "states": "8bit"}
    return [train(config), *(train(config | full) for full in FULL)]


def test_no_more_comes_down_than_is_planned():
    """Gathered values must not, and neither must gradients between two of their parts: on the host they would take the
    room of complete gradients.
    """
    for ample, *runs in run_ranks(2, train_all, timeout_seconds=200):
        for losses, values, report, downloaded in runs:
            assert_same_bits((losses, values), ample[:2])
            print(f"{downloaded} bytes came down, {report['planned_downloaded_bytes']} planned")
            assert 0 < report["num_device_state_chunks"] < report["num_chunks"]
            assert downloaded <= 1.05 * report["planned_downloaded_bytes"]

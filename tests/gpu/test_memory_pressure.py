"""Never out of memory while it would fit, on a real GPU."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.models import Case
from tests.training import assert_same, make_config, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
MIB = 2**20
LENGTHS = (128, 512, 4096, 256, 2048, 128, 4096, 1024)
VOCAB = 8192


def build():
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=4096, n_embd=512, n_layer=6, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def alternating(lengths):
    """The dropout is on: a forward that is run again must draw the same numbers."""
    step = -1

    def batch(generator):
        nonlocal step
        step += 1
        tokens = torch.randint(0, VOCAB, (1, lengths[step % len(lengths)]), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    return Case(build, batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_alternating_sequence_lengths(precision):
    """The first step shows the tide of the shortest sequence only; within little more than the tide of the longest."""
    config = make_config(precision, default_chunk_size=MIB)
    expected = train(alternating(LENGTHS), config, steps=len(LENGTHS))
    longest = train(alternating([4096]), {**config, "device_memory": 16 * 2**30}, steps=2)
    tide = longest.report["device_peak_bytes"] - 14 * longest.report["num_parameters"]
    budget = int(1.15 * tide) + 200 * MIB
    run = train(alternating(LENGTHS), {**config, "device_memory": budget}, steps=len(LENGTHS))
    report = run.report
    print(
        f"{precision}: budget {budget / MIB:.0f} MiB, peak {report['device_peak_bytes'] / MIB:.0f}, "
        f"{report['num_pressure_evictions']} arrays made room"
    )
    assert report["device_peak_bytes"] <= budget
    assert_same(run, expected)

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.engine.test_selective_attention import CountedKernels
from tests.models import Case, llama
from tests.training import assert_same, make_config, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
LENGTH, LAYERS, VOCAB, STEPS = 4096, 8, 512, 4


def build():
    sizes = {"hidden": 1024, "layers": LAYERS, "heads": 8, "kv_heads": 2}
    return llama(**sizes, vocab=VOCAB, length=LENGTH, attention="sdpa")


def batch(generator):
    tokens = torch.randint(0, VOCAB, (4, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def trained(keep_attention, **config):
    section = {"keep_attention": keep_attention, "recompute": "always"}
    config = make_config("bf16", activations=section, default_chunk_size=2**20, **config)
    with CountedKernels() as kernels, sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # its backward can be deterministic
        run = train(Case(build, batch), config, steps=STEPS, checkpointing=False)
    print(f"{keep_attention}: {kernels.count} calls, {run.report['offloaded_bytes']} bytes left the device")
    return run, kernels.count


def test_the_same_bits_with_fewer_calls():
    roomy, count = trained("never")
    assert count == 2 * LAYERS * STEPS
    scarce = {"device_memory": max(roomy.report["device_peak_bytes"] // 2, 2**30)}
    for config in ({}, scarce):
        run, count = trained("always", **config)
        assert LAYERS * STEPS < count < 2 * LAYERS * STEPS
        assert_same(run, roomy)

"""The section ``activations`` in a plan: tiles of tokens, the loss without logits, and what leaves the device."""

from __future__ import annotations

import json

import pytest
import torch

from patrickstar.config import LossComputation
from patrickstar.module.preprocess import make_layout, plan_params
from patrickstar.plan import main
from patrickstar.planning.leaving import Device
from patrickstar.planning.machines import H200
from patrickstar.planning.planner import Workload
from patrickstar.planning.timeline import make_timeline
from patrickstar.planning.uses import trace_uses
from patrickstar.runtime import initialize_engine
from tests.models import VOCAB
from tests.training import make_config

LENGTH, HIDDEN, WIDE, LAYERS, TILE = 1024, 64, 256, 6, 480  # the last tile has 64 tokens
INPUT_BYTES = LENGTH * HIDDEN * 4


def build():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def counted_tide(tile_tokens):
    """The highest of an engine's second step."""
    torch.manual_seed(0)
    section = {"loss": "fused", "tile_tokens": tile_tokens}
    config = make_config("fp32", default_chunk_size=32768, device_memory=2**40, activations=section)
    config["optimizer"]["params"]["use_hybrid_adam"] = False
    engine, optimizer = initialize_engine(build, 0, config)
    with engine:
        engine.train()
        engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        for _ in range(2):
            tokens = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            del loss
            optimizer.step()
        return engine.plan().tide_peak_bytes


def traced(tile_tokens=TILE):
    with torch.device("meta"):
        module = build()
    module.gradient_checkpointing_enable({"use_reentrant": False})
    Workload(model="", batch=1, length=LENGTH, loss=LossComputation.FUSED, tile_tokens=tile_tokens).change(module)
    params = plan_params(module, torch.float32, use_cpu_embedding=False)
    tokens = torch.empty(1, LENGTH, dtype=torch.long, device="meta")
    uses = trace_uses(module, params, torch.float32, {"input_ids": tokens, "labels": tokens}, H200.gpu)
    return uses, make_layout(params, 32768)


def tide(uses, layout):
    return make_timeline(uses, layout, [False] * layout.num_chunks).tide_peak_bytes


def test_the_tide_of_tiles_is_the_counted_one():
    real = counted_tide(TILE)
    planned = tide(*traced(TILE))
    print(f"tide {real} measured, {planned} planned, {planned / real - 1:+.1%}")
    assert planned == pytest.approx(real, rel=0.10)


def test_tiles_compute_hardly_more():
    """But the last product of a layer, which a checkpoint does not compute again and tiles do."""
    whole, tiled = traced(0)[0], traced(TILE)[0]
    assert tiled.flops - whole.flops == 2 * LENGTH * HIDDEN * WIDE * LAYERS
    assert tiled.num_operations > whole.num_operations


def test_what_leaves_is_no_part_of_the_tide():
    """As many inputs of layers as exceed half of the device in forward, those of the first layers first; in later steps
    all, where an allocator keeps what the first one took.
    """
    uses, layout = traced()
    staying = tide(uses, layout)
    device_bytes = 2 * 4 * INPUT_BYTES
    left, away = uses.leaving(Device(num_bytes=device_bytes, room_bytes=2**40))
    print(f"tide {staying} staying, {tide(left, layout)} with {away} away")
    assert 2 * INPUT_BYTES <= away < (LAYERS + 1) * INPUT_BYTES
    # The first backward's, when two may still be leaving and two have come back.
    assert INPUT_BYTES < staying - tide(left, layout) <= away
    scarce = uses.leaving(Device(num_bytes=device_bytes, room_bytes=2 * INPUT_BYTES))[1]
    assert INPUT_BYTES <= scarce <= 2 * INPUT_BYTES
    ample = Device(num_bytes=4 * staying, room_bytes=2**40)
    assert uses.leaving(ample) == (uses.leaving(Device(num_bytes=2**40, room_bytes=0))[0], 0)
    last, later = uses.leaving(Device(num_bytes=device_bytes, room_bytes=2**40, tide_before=2**40))
    assert later >= max(away, LAYERS * INPUT_BYTES)
    assert tide(last, layout) <= tide(left, layout)


def test_the_command(capsys, tmp_path):
    build().config.save_pretrained(tmp_path)
    asked = ["--model", str(tmp_path), "--batch-size", "1", "--seq-len", "65536", "--host-memory", "4GiB"]
    asked += ["--device-memory", "1GiB", "--chunk-numel", "32768", "--checkpointing", "--fused-loss", "--no-advice"]

    def answer(*flags):
        assert main([*asked, *flags, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    whole, tiled = answer(), answer("--tile-tokens", "4096")
    assert whole["config"]["activations"] == {"loss": "fused"}
    assert tiled["config"]["activations"] == {"loss": "fused", "tile_tokens": 4096}
    assert tiled["tide_peak_bytes"] < whole["tide_peak_bytes"]
    assert tiled["tile_tokens"] == 4096 and tiled["stashed_bytes"] == 0
    scarce = ["--tile-tokens", "4096", "--device-memory", f"{tiled['tide_peak_bytes'] * 3 // 2}B"]
    left, kept = answer(*scarce), answer(*scarce, "--offload", "never")
    assert left["stashed_bytes"] > 0 == kept["stashed_bytes"]
    assert left["host_peak_bytes"] >= kept["host_peak_bytes"]
    assert kept["config"]["activations"]["offload"] == "never"
    assert main([*asked, *scarce]) == 0
    out = capsys.readouterr().out
    assert "activations that leave the device: " in out and "MLPs and norms in tiles of 4096 tokens" in out

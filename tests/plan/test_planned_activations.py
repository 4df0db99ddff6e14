import dataclasses
import json

import pytest
import torch

from patrickstar.activations.activation_rules import LEAST_ATTENTION_TOKENS, DeviceShares
from patrickstar.config import LossComputation
from patrickstar.module.layouts import make_layout
from patrickstar.module.preprocess import plan_params
from patrickstar.plan import main
from patrickstar.planning.leaving import LinkedDevice
from patrickstar.planning.machines import H200
from patrickstar.planning.question import Workload
from patrickstar.planning.timeline import play_accesses
from patrickstar.planning.uses import trace_uses
from patrickstar.runtime import initialize_engine
from tests.models import VOCAB, llama
from tests.training import make_config

LENGTH, HIDDEN, WIDE, LAYERS, TILE = 1024, 64, 256, 6, 480  # the last tile has 64 tokens
INPUT_BYTES = LENGTH * HIDDEN * 4


def build(vocab=VOCAB):
    sizes = {"hidden": HIDDEN, "layers": LAYERS, "heads": 2, "kv_heads": 1, "intermediate": WIDE}
    return llama(**sizes, vocab=vocab, length=LENGTH, attention="sdpa", use_cache=False)


def counted_activation_memory(tile_tokens):
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
        return engine.plan().activation_peak_bytes


def traced(tile_tokens=TILE, length=LENGTH):
    with torch.device("meta"):
        module = build()
    module.gradient_checkpointing_enable({"use_reentrant": False})
    Workload(model="", batch=1, length=length, loss=LossComputation.FUSED, tile_tokens=tile_tokens).change(module)
    params = plan_params(module, torch.float32, use_cpu_embedding=False)
    tokens = torch.empty(1, length, dtype=torch.long, device="meta")
    uses = trace_uses(module, params, torch.float32, {"input_ids": tokens, "labels": tokens}, H200.gpu)
    return uses, make_layout(params, 32768)


def activation_memory(uses, layout):
    return play_accesses(uses, layout, [False] * layout.num_chunks).timed(uses).activation_peak_bytes


def test_the_activation_memory_of_tiles_is_the_counted_one():
    real = counted_activation_memory(TILE)
    planned = activation_memory(*traced(TILE))
    print(f"activation memory {real} measured, {planned} planned, {planned / real - 1:+.1%}")
    assert planned == pytest.approx(real, rel=0.10)


def test_tiles_compute_hardly_more():
    whole, tiled = traced(0)[0], traced(TILE)[0]
    assert tiled.flops - whole.flops == 2 * LENGTH * HIDDEN * WIDE * LAYERS
    assert tiled.num_operations > whole.num_operations


def test_what_leaves_is_no_part_of_the_activation_memory():
    uses, layout = traced()

    def leaving(device):
        activation_levels = uses.leaving(device)
        return activation_memory(
            uses.with_activation_levels(activation_levels, activation_levels), layout
        ), activation_levels

    staying = activation_memory(uses, layout)
    device = LinkedDevice(shares=DeviceShares(2 * 4 * INPUT_BYTES, 0), room_bytes=2**40)
    left, first = leaving(device)
    print(f"activation memory {staying} staying, {left} with {first.away_bytes} away")
    assert 2 * INPUT_BYTES <= first.away_bytes < (LAYERS + 1) * INPUT_BYTES
    # The first backward: two may still be leaving and two have come back.
    assert INPUT_BYTES < staying - left <= first.away_bytes
    scarce = leaving(dataclasses.replace(device, room_bytes=2 * INPUT_BYTES))[1].away_bytes
    assert INPUT_BYTES <= scarce <= 2 * INPUT_BYTES
    assert leaving(LinkedDevice(shares=DeviceShares(4 * staying, 0), room_bytes=2**40))[0] == staying
    sent = sum(copies.leaving for copies in first.copies)
    assert first.away_bytes <= sent <= (LAYERS + 2) * INPUT_BYTES
    brought = sum(copies.coming for copies in first.copies)
    assert 0 < brought == sum(copies.needed for copies in first.copies) <= sent
    last, later = leaving(dataclasses.replace(device, seen=first.seen))
    assert later.away_bytes >= first.away_bytes
    assert last <= left


def test_the_one_access_of_the_logits_makes_nothing_leave():
    with torch.device("meta"):
        module = build(vocab=4096)
    module.gradient_checkpointing_enable({"use_reentrant": False})
    params = plan_params(module, torch.float32, use_cpu_embedding=False)
    tokens = torch.empty(1, LENGTH, dtype=torch.long, device="meta")
    uses = trace_uses(module, params, torch.float32, {"input_ids": tokens, "labels": tokens}, H200.gpu)
    layout = make_layout(params, 32768)
    staying = activation_memory(uses, layout)
    device = LinkedDevice(shares=DeviceShares(staying * 5 // 4, 0), room_bytes=2**40)
    first = uses.leaving(device)
    later = uses.leaving(dataclasses.replace(device, seen=first.seen))
    assert first.away_bytes >= INPUT_BYTES and later.away_bytes == 0
    assert activation_memory(uses.with_activation_levels(first, later), layout) == staying
    scarce = dataclasses.replace(device, shares=DeviceShares(staying * 5 // 4, staying // 8 + INPUT_BYTES))
    first = uses.leaving(scarce)
    left = uses.leaving(dataclasses.replace(scarce, seen=first.seen)).away_bytes
    assert 0 < left < LAYERS * INPUT_BYTES
    assert activation_memory(uses.with_activation_levels(first, None), layout) < staying


def test_attention_that_is_kept():
    uses, _ = traced(length=2 * LEAST_ATTENTION_TOKENS)
    least = LEAST_ATTENTION_TOKENS * 2 * HIDDEN * 4
    ample = LinkedDevice(shares=DeviceShares(64 * least, 0), room_bytes=2**40)
    first = uses.leaving(ample)
    assert first.kept_calls == 0 == sum(first.saved_seconds)
    counts, seconds = [], []
    for room in (0, 2 * least, 2**40):
        device = LinkedDevice(shares=DeviceShares(12 * least, 0), room_bytes=room)
        activation_levels = uses.leaving(dataclasses.replace(device, seen=uses.leaving(device).seen))
        counts.append(activation_levels.kept_calls)
        seconds.append(sum(activation_levels.saved_seconds))
        enough = dataclasses.replace(device, seen=uses.leaving(device).seen, room_bytes=2**40)
        levels = uses.leaving(enough)
        assert uses.leaving(dataclasses.replace(enough, room_bytes=levels.enough_room_bytes)) == levels
        assert uses.leaving(dataclasses.replace(enough, room_bytes=levels.enough_room_bytes - 1)) != levels
    print(counts, seconds)
    assert counts[0] < counts[-1] == LAYERS and counts == sorted(counts)
    assert seconds == pytest.approx([count / LAYERS * seconds[-1] for count in counts])
    calls = uses.with_activation_levels(first, activation_levels).calls
    for before, after in zip(uses.calls, calls, strict=True):  # what is kept is no more to be gained by saving products
        assert before.recompute_seconds - after.recompute_seconds == pytest.approx(seconds[-1] / LAYERS)
        assert before.product_seconds - after.product_seconds == pytest.approx(seconds[-1] / LAYERS)
        assert after.recompute_seconds > after.product_seconds > 0
    assert len(calls) == LAYERS
    assert traced()[0].leaving(dataclasses.replace(ample, seen=first.seen)).kept_calls == 0


def test_the_command(capsys, tmp_path):
    build().config.save_pretrained(tmp_path)
    asked = [
        "--model",
        str(tmp_path),
        "--no-checkpointing",
        "--batch-size",
        "1",
        "--seq-len",
        "32000",
        "--host-memory",
        "4GiB",
    ]
    asked += ["--device-memory", "1GiB", "--chunk-numel", "32768", "--checkpointing", "--fused-loss", "--no-advice"]
    asked += ["--recompute", "always"]

    def answer(*flags):
        assert main([*asked, *flags, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    whole, tiled = answer(), answer("--tile-tokens", "4096")
    section = {"loss": "fused", "recompute": "always"}
    assert whole["config"]["activations"] == section
    assert tiled["config"]["activations"] == section | {"tile_tokens": 4096}
    assert tiled["activation_peak_bytes"] < whole["activation_peak_bytes"]
    assert tiled["tile_tokens"] == 4096 and tiled["offloaded_bytes"] == 0
    scarce = ["--tile-tokens", "4096", "--device-memory", f"{tiled['activation_peak_bytes'] * 11 // 10}B"]
    left, kept = answer(*scarce), answer(*scarce, "--offload", "never")
    assert left["offloaded_bytes"] > 0 == kept["offloaded_bytes"]
    assert left["host_peak_bytes"] >= kept["host_peak_bytes"]
    assert kept["config"]["activations"]["offload"] == "never"
    assert main([*asked, *scarce, "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "activations that leave the device: " in out and "MLPs and norms in tiles of 4096 tokens" in out
    assert tiled["selective_attention"] == 0 and "attention of checkpointed layers" not in out
    assert main([*asked, "--seq-len", "40000", "--verbose"]) == 0
    assert f"attention of checkpointed layers: {LAYERS} calls are kept for backward" in capsys.readouterr().out

"""Checkpoints of states in 8 and 16 bits hold their bytes as they are stored."""

import json

import pytest
import torch

from patrickstar import CheckpointError
from patrickstar.checkpoint import Checkpoint
from patrickstar.checkpoint.stored_source import merge
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.checkpoint.test_damage import as_file, described
from tests.distributed import run_ranks
from tests.engine.test_disk import disk
from tests.engine.test_equality import short_batch, wide_gpt2
from tests.schemes import config_of

SCHEMES = {
    "8bit": ("AdamW", "8bit"),
    "bf16": ("AdamW", "bf16"),
    "8bit without masters": ("AdamW", "8bit", "stochastic"),
    "Lion": ("Lion", "8bit"),
}
BYTES = {"8bit": 4 + 2 * 260 / 256, "bf16": 4 + 4, "8bit without masters": 2 + 2 * 260 / 256, "Lion": 4 + 260 / 256}


def engine_of(scheme, seed=0, **more):
    torch.manual_seed(seed)
    config = config_of(*scheme, default_chunk_size=16 * 1024, gradient_clipping=0.5, **more)
    return initialize_engine(wide_gpt2, 0, config)


def train(engine, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        engine.backward(engine(**short_batch(generator)).loss)
        optimizer.step()
        optimizer.zero_grad()


def state_of(engine, optimizer):
    return {"model": engine.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def large_bytes(path):
    """Bytes per parameter of the matrices that have 8-bit moments."""
    tensors = [tensor for tensor in Checkpoint(path).manifest.tensors.values() if "mlp" in tensor.name]
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    values = sum(tensor.numel for tensor in matrices if tensor.kind == "master")
    return sum(shard.num_bytes for tensor in matrices for shard in tensor.shards) / values


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_goes_on_bit_for_bit_and_its_checkpoint_is_small(scheme, tmp_path):
    engine, optimizer = engine_of(SCHEMES[scheme])
    with engine:
        train(engine, optimizer, 3, seed=1)
        path = engine.save_checkpoint(tmp_path)
        saved = state_of(engine, optimizer)
        train(engine, optimizer, 2, seed=2)
        after = state_of(engine, optimizer)
    assert large_bytes(path) == pytest.approx(BYTES[scheme], rel=0.01)
    engine, optimizer = engine_of(SCHEMES[scheme], seed=5, on_device=False)
    with engine:
        train(engine, optimizer, 1, seed=3)
        engine.load_checkpoint(tmp_path)
        assert_same_bits(state_of(engine, optimizer), saved)
        train(engine, optimizer, 2, seed=2)
        assert_same_bits(state_of(engine, optimizer), after)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_float32_states_take_the_values_over(scheme, tmp_path):
    rule = SCHEMES[scheme][0]
    engine, optimizer = engine_of(SCHEMES[scheme])
    with engine:
        train(engine, optimizer, 3, seed=1)
        path = engine.save_checkpoint(tmp_path / "run")
        saved = state_of(engine, optimizer)
    merged = merge(Checkpoint(path), tmp_path / "merged")
    for folder in (path.parent, merged.parent):
        engine, optimizer = engine_of((rule, "fp32"), seed=5)
        with engine:
            engine.load_checkpoint(folder, tag="merged" if folder == merged.parent else None)
            assert_same_bits(state_of(engine, optimizer), saved)
    names = {tensor.dtype for tensor in Checkpoint(merged).manifest.tensors.values() if tensor.kind == "exp_avg"}
    assert names <= {torch.float32, torch.bfloat16}
    assert not any(shard.encoding for tensor in Checkpoint(merged).manifest.tensors.values() for shard in tensor.shards)


def checksums(path):
    tensors = Checkpoint(path).manifest.tensors
    return {key: [(shard.begin, shard.encoding, shard.crc32c) for shard in tensors[key].shards] for key in tensors}


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_bytes_do_not_depend_on_the_place_of_states(place, tmp_path):
    more = {"on_device": place == "device"}
    if place == "disk":
        more.update(disk(tmp_path / "disk"), host_memory="3MiB")
        (tmp_path / "disk").mkdir()
    engine, optimizer = engine_of(SCHEMES["8bit"], **more)
    with engine:
        train(engine, optimizer, 3, seed=1)
        now = engine.save_checkpoint(tmp_path / "now", "a")
        later = engine.save_checkpoint(tmp_path / "later", "a", wait=False)
        engine.wait_for_save()
        assert (engine.report().get("num_disk_chunks", 0) > 0) == (place == "disk")
    assert checksums(later) == checksums(now)
    engine, optimizer = engine_of(SCHEMES["8bit"])
    with engine:
        train(engine, optimizer, 3, seed=1)
        assert checksums(engine.save_checkpoint(tmp_path / "usual", "a")) == checksums(now)


def save_on_rank(folder, wait):
    engine, optimizer = engine_of(SCHEMES["8bit"])
    with engine:
        train(engine, optimizer, 3, seed=1)
        engine.save_checkpoint(folder, "a", wait=wait)
        engine.wait_for_save()
        saved = state_of(engine, optimizer)
        train(engine, optimizer, 2, seed=2)
        engine.load_checkpoint(folder)
        assert_same_bits(state_of(engine, optimizer), saved)
        return saved


@pytest.mark.parametrize("wait", [True, False])
def test_two_ranks_save_and_one_takes_over(wait, tmp_path):
    saved = run_ranks(2, save_on_rank, str(tmp_path), wait)[0]
    assert large_bytes(tmp_path / "a") == pytest.approx(BYTES["8bit"], rel=0.01)
    engine, optimizer = engine_of(("AdamW", "fp32"), seed=5)
    with engine:
        engine.load_checkpoint(tmp_path)
        assert_same_bits(state_of(engine, optimizer), saved)


def test_a_checkpoint_of_version_1_is_read(tmp_path):
    engine, optimizer = engine_of(("AdamW", "fp32"))
    with engine:
        train(engine, optimizer, 2, seed=1)
        path = engine.save_checkpoint(tmp_path)
        saved = state_of(engine, optimizer)
        (path / "manifest.json").write_bytes(as_file({**described(path), "version": 1}))
        train(engine, optimizer, 1, seed=2)
        engine.load_checkpoint(tmp_path)
        assert_same_bits(state_of(engine, optimizer), saved)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"encoding": "signed4"}, "signed4.*does not know it"),
        ({"encoding": 8}, "encoding '8'"),
        ({"encoding": None}, "are said to take"),
        ({"bytes": 1}, "are said to take 1 bytes"),
    ],
)
def test_hostile_encodings(change, match, tmp_path):
    engine, optimizer = engine_of(SCHEMES["8bit"])
    with engine:
        train(engine, optimizer, 1, seed=1)
        path = engine.save_checkpoint(tmp_path)
        manifest = described(path)
        shards = [shard for tensor in manifest["tensors"] for shard in tensor["shards"]]
        next(shard for shard in shards if "encoding" in shard).update(change)
        (path / "manifest.json").write_bytes(as_file(json.loads(json.dumps(manifest))))
        with pytest.raises(CheckpointError, match=match):
            engine.load_checkpoint(tmp_path)

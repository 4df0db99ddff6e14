import shutil
from pathlib import Path

import pytest
import torch

from patrickstar import CheckpointError, StateError
from patrickstar.checkpoint import Checkpoint, SaveOptions
from patrickstar.checkpoint.rng import rng_states
from patrickstar.runtime import initialize_engine
from patrickstar.state.engine_shards import EngineSink
from patrickstar.state.rank_peers import RankPeers
from patrickstar.state.save_load import save_session
from tests.bits import assert_same_bits, first_difference
from tests.distributed import run_ranks
from tests.models import MODELS
from tests.training import make_config

CASE = MODELS["conv_net"]  # has buffers
TAG = "t"


def trained_engine(seed):
    torch.manual_seed(seed)
    engine, optimizer = initialize_engine(CASE.build, 0, make_config(default_chunk_size=1024))
    engine.train()
    step(engine, optimizer, seed)
    return engine, optimizer


def step(engine, optimizer, seed):
    loss = CASE.loss(engine(**CASE.batch(torch.Generator().manual_seed(seed))))
    engine.backward(loss)
    optimizer.step()
    return loss.item()


def save(engine, folder, max_file_bytes):
    options = SaveOptions(peers=RankPeers(engine._session.ranks.control), max_file_bytes=max_file_bytes)
    return save_session(engine._session, folder, TAG, None, None, options)


def all_of(engine, optimizer):
    session = engine._session
    return {
        "values": engine.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random numbers": rng_states(engine.device),
        "steps": session.num_steps,
        "stage": session.stage.name,
        "scaler": session.scaler and session.scaler.state(),
    }


def save_on_a_rank(folder):
    engine, _ = trained_engine(0)
    with engine:
        save(engine, folder, 40_000)


def damaged_copies(path, copies):
    def change(file, position):
        data = bytearray(file.read_bytes())
        data[position] ^= 1
        file.write_bytes(data)

    ways = {
        "missing": Path.unlink,
        "shorter": lambda file: file.write_bytes(file.read_bytes()[:-1]),
        "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
        "empty": lambda file: file.write_bytes(b""),
        "another length of its header": lambda file: change(file, 0),
        "another header": lambda file: change(file, 20),
    }
    made = []
    for file in sorted(path.iterdir()):
        for way, damage in ways.items():
            copy = copies / f"{file.name} {way}"
            shutil.copytree(path, copy)
            damage(copy / file.name)
            made.append(copy)
    return made


def load_each(folders):
    engine, optimizer = trained_engine(1)
    results = []
    with engine:
        before = all_of(engine, optimizer)
        for folder in folders:
            try:
                engine.load_checkpoint(folder)
                said = "it was loaded"
            except CheckpointError as error:
                said = str(error)
            results.append((said, first_difference(all_of(engine, optimizer), before)))
        step(engine, optimizer, 2)  # it can be trained on
    return results


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 2)])
def test_a_broken_file_is_found_before_anything_changes(tmp_path, saving, loading):
    run_ranks(saving, save_on_a_rank, str(tmp_path / "whole"))
    path = tmp_path / "whole" / TAG
    files = len(list(path.iterdir()))
    folders = damaged_copies(path, tmp_path)
    assert files > 2 * saving and len(folders) == 6 * files
    for results in run_ranks(loading, load_each, folders):
        for folder, (said, changed) in zip(folders, results, strict=True):
            assert "no checkpoint was loaded" in said or "is no checkpoint" in said, folder.name
            assert folder.name.split()[0] in said or folder.name.startswith("manifest"), said
            assert changed is None, f"{folder.name}: {changed}"


def test_a_file_that_was_refused_is_refused_again(tmp_path):
    engine, _ = trained_engine(0)
    with engine:
        path = save(engine, tmp_path, 2**30)
        file = path / "rank00000-00000.safetensors"
        file.write_bytes(file.read_bytes() + b"\0")
        with Checkpoint(path) as checkpoint:
            for _ in range(2):
                with pytest.raises(CheckpointError, match="were saved"):
                    checkpoint.load(EngineSink(engine._session))


def damage_last_tensor(path):
    with Checkpoint(path) as checkpoint:
        shards = [shard for stored in checkpoint.manifest.tensors.values() for shard in stored.shards]
        name = list(checkpoint.manifest.tensors)[-4][0]
        shard = checkpoint.tensor(name, "buffer").shards[0]
    assert len(shards) > 10
    data = bytearray((path / shard.file).read_bytes())
    data[shard.offset] ^= 1
    (path / shard.file).write_bytes(data)


def interrupt(monkeypatch):
    write, calls = EngineSink.write, []

    def interrupted(self, wanted, values):
        calls.append(wanted)
        if len(calls) == 5:
            raise KeyboardInterrupt
        write(self, wanted, values)

    monkeypatch.setattr(EngineSink, "write", interrupted)


@pytest.mark.parametrize("how", ["damage", "interrupt"])
def test_an_engine_that_got_half_of_a_checkpoint_trains_no_more(tmp_path, how, monkeypatch):
    expected_engine, expected_optimizer = trained_engine(0)
    with expected_engine:
        good = save(expected_engine, tmp_path / "good", 2**30)
        bad = save(expected_engine, tmp_path / "bad", 2**30)
        expected = step(expected_engine, expected_optimizer, 3)
        state = all_of(expected_engine, expected_optimizer)
    engine, optimizer = trained_engine(1)
    with engine:
        before = all_of(engine, optimizer)
        loss = CASE.loss(engine(**CASE.batch(torch.Generator().manual_seed(5))))
        with monkeypatch.context() as patched:
            if how == "damage":
                damage_last_tensor(bad)
            else:
                interrupt(patched)
            with pytest.raises(CheckpointError if how == "damage" else KeyboardInterrupt):
                engine.load_checkpoint(tmp_path / "bad")
        assert first_difference(all_of(engine, optimizer)["values"], before["values"]) is not None
        batch = CASE.batch(torch.Generator().manual_seed(5))
        for call in (
            lambda: engine(**batch),
            lambda: engine.module(**batch),
            lambda: engine.run_forward(lambda: engine.module(**batch)),
            lambda: engine.backward(loss),
            optimizer.step,
            lambda: engine.save_checkpoint(tmp_path / "again"),
            lambda: engine.export_weights(tmp_path / "weights"),
        ):
            with pytest.raises(StateError, match=f"left a mixed state: {bad} was loaded in part; load a checkpoint"):
                call()
        assert not (tmp_path / "again").exists() and not (tmp_path / "weights").exists()
        with pytest.raises(CheckpointError):  # refused before it begins: the engine is no more whole than before
            engine.load_checkpoint(tmp_path / "none")
        with pytest.raises(StateError, match="left a mixed state"):
            engine(**batch)
        assert engine.load_checkpoint(tmp_path / "good") == (good, {})
        assert_same_bits(step(engine, optimizer, 3), expected)
        assert_same_bits(all_of(engine, optimizer), state)

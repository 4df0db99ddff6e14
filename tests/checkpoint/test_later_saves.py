import errno
import multiprocessing
import os
import threading
import time

import pytest
import torch

from patrickstar.checkpoint import Checkpoint, CheckpointError, file_stream, latest_tag, snapshot, tags
from patrickstar.checkpoint.disk import Disk
from patrickstar.checkpoint.memory import bytes_at
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import RanksFailedError, rank_outcomes, run_ranks
from tests.models import gpt2, token_batch
from tests.training import make_config


def engine_of(states="fp32", **options):
    torch.manual_seed(0)
    config = make_config("bf16", default_chunk_size=4096, gradient_clipping=1.0, **options)
    config["optimizer"]["states"] = states
    return initialize_engine(lambda: gpt2(layers=3), 0, config)


def train(engine, optimizer, steps, begin=0):
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for step in range(begin, begin + steps):
        batch = token_batch(torch.Generator().manual_seed(step * size + rank))
        engine.backward(engine(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Gate:
    """Stops writes until it is opened."""

    def __init__(self, monkeypatch, failure=None):
        self.opened, self.failure = threading.Event(), failure
        write = Disk.write

        def gated(disk, fd, data):
            if threading.current_thread() is not threading.main_thread():
                assert self.opened.wait(60)
                if self.failure is not None:
                    raise self.failure
            return write(disk, fd, data)

        monkeypatch.setattr(Disk, "write", gated)


@pytest.mark.parametrize("options", [{}, {"device_memory": "280KiB"}, {"states": "8bit"}, {"use_cpu_embedding": True}])
def test_bytes_are_those_of_the_call(options, tmp_path, monkeypatch):
    engine, optimizer = engine_of(**options)
    with engine:
        train(engine, optimizer, 2)
        engine.save_checkpoint(tmp_path / "now", "a", {"epoch": 1})
        gate = Gate(monkeypatch)
        engine.save_checkpoint(tmp_path / "later", "a", {"epoch": 1}, wait=False)
        train(engine, optimizer, 3, begin=2)
        after = engine.state_dict()
        gate.opened.set()
        engine.wait_for_save()
        assert files(tmp_path / "later" / "a") == files(tmp_path / "now" / "a")
        engine.load_checkpoint(tmp_path / "later")
        train(engine, optimizer, 3, begin=2)
        assert_same_bits(engine.state_dict(), after)


def test_values_that_are_converted_for_the_copy(tmp_path):
    """A frozen 16-bit parameter, and a trained one that is not row-major in memory, are read into temporary tensors."""

    def build():
        torch.manual_seed(0)
        model = gpt2(layers=3)
        model.transformer.h[0].requires_grad_(False)
        trained = model.transformer.h[1].mlp.c_fc
        trained.weight = torch.nn.Parameter(trained.weight.detach().t().contiguous().t())
        return model

    engine, optimizer = initialize_engine(build, 0, make_config("bf16", default_chunk_size=4096))
    with engine:
        train(engine, optimizer, 2)
        engine.save_checkpoint(tmp_path / "now", "a")
        engine.save_checkpoint(tmp_path / "later", "a", wait=False)
        engine.wait_for_save()
        assert files(tmp_path / "later" / "a") == files(tmp_path / "now" / "a")


def test_what_finds_no_memory_is_written_by_the_call(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(snapshot, "_PIECE_BYTES", 4096)
    on_host = {"device_memory": "280KiB"}
    engine, optimizer = engine_of(**on_host)
    with engine:
        train(engine, optimizer, 2)
        least = engine.report()["host_peak_bytes"]
    for memory in (least, least + 200_000):
        engine, optimizer = engine_of(**on_host, host_memory=memory)
        with engine:
            train(engine, optimizer, 2)
            expected = engine.state_dict()
            gate = Gate(monkeypatch)
            with caplog.at_level("INFO", "patrickstar"):
                engine.save_checkpoint(tmp_path, wait=False)
            train(engine, optimizer, 2, begin=2)
            gate.opened.set()
            engine.wait_for_save()
            engine.load_checkpoint(tmp_path)
            assert_same_bits(engine.state_dict(), expected)
            train(engine, optimizer, 2, begin=2)
    copied, written = zip(
        *(record.args[2:] for record in caplog.records if "a thread writes" in record.msg), strict=True
    )
    assert copied[0] == "0 bytes" != copied[1]
    assert "0 bytes" not in written


def test_large_copies_are_written_from_where_they_lie(tmp_path, monkeypatch):
    copied = []
    for module in (file_stream, snapshot):
        monkeypatch.setattr(module, "LEAST_UNCOPIED_BYTES", 4096)
    monkeypatch.setattr(file_stream, "_LEAST_BYTES", 0)
    monkeypatch.setattr(file_stream, "_BLOCK_BYTES", 4096)
    engine, optimizer = engine_of()
    with engine:
        train(engine, optimizer, 2)
        expected = files(engine.save_checkpoint(tmp_path / "now", "a"))
        fill = file_stream._Block.fill
        counted = lambda block, data: copied.append(fill(block, data)) or copied[-1]  # noqa: E731
        monkeypatch.setattr(file_stream._Block, "fill", counted)
        path = engine.save_checkpoint(tmp_path / "later", "a", wait=False)
        engine.wait_for_save()
    assert files(path) == expected
    assert 0 < sum(copied) < sum(map(len, expected.values())) / 2


def test_a_copy_that_changes_before_it_is_written_is_found(tmp_path, monkeypatch):
    taken = []
    add = snapshot.Snapshot.add

    def noting(self, shard, pieces, crcs):
        taken.extend(pieces)
        add(self, shard, pieces, crcs)

    monkeypatch.setattr(snapshot.Snapshot, "add", noting)
    engine, optimizer = engine_of()
    with engine:
        train(engine, optimizer, 1)
        gate = Gate(monkeypatch)
        engine.save_checkpoint(tmp_path, wait=False)
        piece = max(taken, key=lambda piece: piece.num_bytes)
        bytes_at(piece.address, piece.num_bytes)[5] ^= 4
        gate.opened.set()
        engine.wait_for_save()
    with Checkpoint.find(tmp_path, None) as checkpoint, pytest.raises(CheckpointError, match=piece.shard.name):
        checkpoint.verify()


def test_copies_take_no_more_than_the_configuration_says(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(snapshot, "_PIECE_BYTES", 4096)
    engine, optimizer = engine_of(checkpoint={"host_memory": 100_000})
    with engine:
        train(engine, optimizer, 1)
        gate = Gate(monkeypatch)
        before = engine.report()["host_bytes"]
        with caplog.at_level("INFO", "patrickstar"):
            engine.save_checkpoint(tmp_path, wait=False)
        assert 90_000 < engine.report()["host_bytes"] - before <= 110_000
        gate.opened.set()
    (copied,) = (record.args[2] for record in caplog.records if "a thread writes" in record.msg)
    assert copied.endswith("KiB")
    with Checkpoint.find(tmp_path, None) as checkpoint:
        checkpoint.verify()


def test_a_failure_comes_before_the_next_step(tmp_path, monkeypatch):
    engine, optimizer = engine_of()
    with engine:
        train(engine, optimizer, 1)
        engine.save_checkpoint(tmp_path, "old")
        with monkeypatch.context() as patched:
            gate = Gate(patched, OSError(errno.ENOSPC, "no space"))
            engine.save_checkpoint(tmp_path, "new", wait=False)
            train(engine, optimizer, 1, begin=1)
            gate.opened.set()
            engine._session.saves._thread.join()
            before = engine.state_dict()
            with pytest.raises(CheckpointError, match="checkpoint 'new' was not saved .* no space"):
                train(engine, optimizer, 1, begin=2)
            assert_same_bits(engine.state_dict(), before)
        optimizer.step()
        assert {path.name for path in tmp_path.iterdir()} == {"old", "latest"}
        engine.save_checkpoint(tmp_path, "new", wait=False)  # goes on, and close() waits
    assert latest_tag(tmp_path) == "new"


def test_a_failure_comes_before_a_resize(tmp_path, monkeypatch):
    engine, _ = engine_of()
    with engine:
        gate = Gate(monkeypatch, OSError(errno.ENOSPC, "no space"))
        engine.save_checkpoint(tmp_path, "new", wait=False)
        threading.Timer(0.2, gate.opened.set).start()
        with pytest.raises(CheckpointError, match="checkpoint 'new' was not saved .* no space"):
            engine.resize(1, user_state={})


@pytest.mark.parametrize("end", ["save", "close", "discard"])
def test_other_calls_wait(end, tmp_path, monkeypatch):
    engine, optimizer = engine_of()
    train(engine, optimizer, 1)
    gate = Gate(monkeypatch)
    engine.save_checkpoint(tmp_path, "a", wait=False)
    threading.Timer(0.2, gate.opened.set).start()
    if end == "save":
        engine.save_checkpoint(tmp_path, "b")
        assert (tmp_path / "a" / "manifest.json").exists()
    engine.discard() if end == "discard" else engine.close()
    assert latest_tag(tmp_path) == ("b" if end == "save" else "a")


def save_on_ranks(folder, fails):
    engine, optimizer = engine_of()
    found = {}
    with engine, pytest.MonkeyPatch.context() as patched:
        train(engine, optimizer, 2)
        engine.save_checkpoint(f"{folder}/now", "a")
        rank = int(os.environ["RANK"])
        gate = Gate(patched, OSError(errno.EIO, "bad disk") if fails and rank == 1 else None)
        engine.save_checkpoint(f"{folder}/later", "a", wait=False)
        train(engine, optimizer, 2, begin=2)
        found["state"] = engine.state_dict()
        gate.opened.set()
        for step in range(4, 400):
            try:
                train(engine, optimizer, 1, begin=step)
            except CheckpointError as error:
                return step, str(error)
            if not engine._session.saves.is_running:
                break
        engine.load_checkpoint(f"{folder}/later")
        train(engine, optimizer, 2, begin=2)
        assert_same_bits(engine.state_dict(), found["state"])
    return None


def test_ranks_save_together(tmp_path):
    assert run_ranks(2, save_on_ranks, str(tmp_path), False) == [None, None]
    assert files(tmp_path / "later" / "a") == files(tmp_path / "now" / "a")


def test_one_ranks_failure_is_raised_by_all_in_the_same_step(tmp_path):
    one, other = run_ranks(2, save_on_ranks, str(tmp_path), True)
    assert one == other
    assert "rank 1: bad disk" in one[1]
    assert list((tmp_path / "later").iterdir()) == []


def test_a_process_that_is_forked_meanwhile_holds_no_lock(tmp_path, monkeypatch):
    engine, optimizer = engine_of()
    with engine:
        train(engine, optimizer, 1)
        gate = Gate(monkeypatch)
        engine.save_checkpoint(tmp_path, "a", wait=False)
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
        gate.opened.set()
        engine.save_checkpoint(tmp_path, "b")
        assert worker.is_alive()
        worker.kill()
    assert tags(tmp_path) == ["a", "b"]


def lose_a_rank(folder):
    engine, optimizer = engine_of()
    train(engine, optimizer, 1)
    rank = int(os.environ["RANK"])
    if rank == 1:
        Disk.write = lambda *_: os._exit(7)
    with engine:
        engine.save_checkpoint(folder, "a", wait=False)
        train(engine, optimizer, 1000, begin=1)


def test_a_rank_that_is_lost_ends_the_save_of_the_others(tmp_path):
    first, second = rank_outcomes(2, lose_a_rank, str(tmp_path), timeout_seconds=60)
    assert second.returncode == 7
    assert first.returncode == 1 and first.error.startswith("RankFailure: ")
    assert latest_tag(tmp_path) is None


def save_and_die(folder, call):
    engine, optimizer = engine_of()
    train(engine, optimizer, 1)
    engine.save_checkpoint(folder, "old")
    original = getattr(Disk, call)

    def dies(disk, *args):
        if threading.current_thread() is not threading.main_thread():
            os._exit(7)
        return original(disk, *args)

    setattr(Disk, call, dies)
    engine.save_checkpoint(folder, "new", wait=False)
    train(engine, optimizer, 1000, begin=1)


@pytest.mark.parametrize("call", ["write", "sync", "rename", "sync_folder"])
def test_a_process_that_is_killed_leaves_the_former_checkpoint(call, tmp_path):
    with pytest.raises(RanksFailedError, match="ended with 7"):
        run_ranks(1, save_and_die, str(tmp_path), call)
    engine, optimizer = engine_of()
    with engine:
        engine.load_checkpoint(tmp_path, "old")
        assert latest_tag(tmp_path) == "old"
        train(engine, optimizer, 1)
        engine.save_checkpoint(tmp_path, "new")
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new", "latest"}

"""A save that ends anywhere, by a kill or by an error, leaves a loadable checkpoint: the old one or the new one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from patrickstar.checkpoint import Checkpoint, CheckpointError, SaveOptions, latest_tag, save, tags
from patrickstar.checkpoint.disk import Disk, locked
from tests.checkpoint.ranks import Held, HeldSink, HeldSource, on_ranks

CALLS = [name for name in vars(Disk) if not name.startswith("_")]
KILLED, FINISHED = 77, 0


class FaultyDisk(Disk):
    """Does ``fault(name)`` instead of the n-th call, and of all after it where ``and_on``."""

    def __init__(self, at, fault, and_on=False):
        self.count, self.names = 0, []
        self._at, self._fault, self._and_on = at, fault, and_on

    def before(self, name):
        self.count += 1
        self.names.append(name)
        if self.count == self._at or (self._and_on and self.count > self._at):
            self._fault(name)


def _faulty(name):
    def call(self, *args):
        if name != "close":  # which is not an operation that a full disk refuses
            self.before(name)
        return getattr(Disk, name)(self, *args)

    return call


for _name in CALLS:
    setattr(FaultyDisk, _name, _faulty(_name))


def tensors(version, num_ranks):
    """Two parameters; the bits of one version in one never go with those of another."""
    cuts = [round(12 * rank / num_ranks) for rank in range(num_ranks + 1)]
    return [Held(f"p{index}", "master", torch.arange(12.0) + 100 * version + 1000 * index, cuts) for index in range(2)]


def save_version(path, version, tag, num_ranks=1, disk=None):
    held = tensors(version, num_ranks)  # here, since PyTorch refuses to compute in threads of a forked process

    def work(peers):
        options = SaveOptions(peers=peers, disk=disk or Disk(), max_file_bytes=40)
        return save(path, tag, HeldSource(held, peers.rank), {"version": version}, options)

    return on_ranks(num_ranks, work)


def loaded_version(path, tag=None):
    """The version of a checkpoint, whose every bit is that version's."""
    with Checkpoint.find(path, tag) as checkpoint:
        checkpoint.verify()
        version = checkpoint.manifest.state["version"]
        sink = HeldSink(tensors(version, 1), 0)
        checkpoint.load(sink)
        sink.check()
    return version


def in_a_child(work):
    """Its exit status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(FINISHED)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("tag", ["new", "old"])
def test_killed_at_every_call(tmp_path, tag, num_ranks):
    """A new tag, and the tag that is there already."""
    statuses = []
    versions = set()
    at = 0
    while FINISHED not in statuses:
        at += 1
        path = tmp_path / str(at)
        assert save_version(path, 1, "old", num_ranks) == [path / "old"] * num_ranks

        def killed(path=path, at=at):
            disk = FaultyDisk(at, lambda name: os._exit(KILLED))
            if any(isinstance(result, Exception) for result in save_version(path, 2, tag, num_ranks, disk)):
                os._exit(2)

        statuses.append(in_a_child(killed))
        assert statuses[-1] in (KILLED, FINISHED)
        versions.add(loaded_version(path))
        assert {loaded_version(path, found) for found in tags(path)} <= {1, 2}
        if tag == "new":
            assert loaded_version(path, "old") == 1
        assert len([left for left in path.iterdir() if left.name.startswith(".")]) <= 2
        # The next save goes through, and clears what is left.
        assert save_version(path, 3, "next") == [path / "next"]
        assert loaded_version(path) == 3
        assert not [left for left in path.iterdir() if left.name.startswith(".")]
    print(f"{tag}, {num_ranks} ranks: killed at {len(statuses) - 1} calls")
    assert len(statuses) > 20
    assert versions == {1, 2}


def raising(code):
    def fault(name):
        raise OSError(code, os.strerror(code))

    return fault


@pytest.mark.parametrize("and_on", [False, True], ids=["once", "from there on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("tag", ["new", "old"])
def test_an_error_at_every_call(tmp_path, tag, code, and_on):
    """One clear error, the old checkpoint or the complete new one, no descriptor left open."""
    at, outcomes, open_before = 0, [], len(list(Path("/proc/self/fd").iterdir()))
    while outcomes[-1:] != ["saved"]:
        at += 1
        path = tmp_path / str(at)
        save_version(path, 1, "old")
        disk = FaultyDisk(at, raising(code), and_on)
        (result,) = save_version(path, 2, tag, disk=disk)
        if isinstance(result, Exception):
            assert isinstance(result, CheckpointError), disk.names
            assert os.strerror(code) in str(result)
            outcomes.append("complete" if "is complete" in str(result) else "refused")
            if outcomes[-1] == "refused":
                assert loaded_version(path) == loaded_version(path, "old") == 1
                assert tags(path) == ["old"]
                if not and_on:
                    assert sorted(left.name for left in path.iterdir()) == ["latest", "old"]
            else:
                assert loaded_version(path, tag) == 2
                assert loaded_version(path) in (1, 2)
        elif at <= disk.count:  # a fault while removing the replaced checkpoint is a warning
            outcomes.append("left over")
            assert loaded_version(path) == 2
        else:
            outcomes.append("saved")
        assert save_version(path, 3, "next") == [path / "next"]
        assert not [left for left in path.iterdir() if left.name.startswith(".")]
    assert outcomes.count("refused") > 10
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_short_writes(tmp_path):
    class Short(Disk):
        def write(self, fd, data):
            return super().write(fd, data[:3])

    assert save_version(tmp_path, 1, "t", disk=Short()) == [tmp_path / "t"]
    assert loaded_version(tmp_path) == 1


def test_a_disk_that_takes_nothing_is_full(tmp_path):
    class Full(Disk):
        def write(self, fd, data):
            return 0

    (error,) = save_version(tmp_path, 1, "t", disk=Full())
    assert os.strerror(errno.ENOSPC) in str(error)
    assert "rank00000-00000.safetensors" in str(error)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_a_file_system_that_cannot_exchange_folders(tmp_path, code):
    class Poor(Disk):
        def exchange(self, one, other):
            raise OSError(code, os.strerror(code))

    save_version(tmp_path, 1, "t")
    (error,) = save_version(tmp_path, 2, "t", disk=Poor())
    assert "save under another tag" in str(error)
    assert loaded_version(tmp_path) == 1
    assert save_version(tmp_path, 2, "u", disk=Poor()) == [tmp_path / "u"]


def test_one_process_saves_at_a_time(tmp_path):
    save_version(tmp_path, 1, "t")
    with locked(tmp_path):
        (error,) = save_version(tmp_path, 2, "t")
    assert "another process is saving" in str(error)
    assert loaded_version(tmp_path) == 1


def test_a_checkpoint_stays_readable_while_it_is_replaced(tmp_path):
    save_version(tmp_path, 1, "t")
    with Checkpoint.find(tmp_path) as checkpoint:
        sink = HeldSink(tensors(1, 1), 0)
        next(iter(sink.wanted()))
        checkpoint.verify()  # its files are open
        save_version(tmp_path, 2, "t")
        checkpoint.load(sink)
        sink.check()
    assert loaded_version(tmp_path) == 2


def test_files_honour_the_umask_and_follow_no_link(tmp_path):
    before = os.umask(0o027)
    try:
        save_version(tmp_path / "a", 1, "t")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "a").rglob("*")}
    assert modes.pop("t") == 0o750
    assert set(modes.values()) == {0o640}
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    link = tmp_path / "link"
    link.symlink_to(target)
    for open_file in (Disk().create, Disk().open):
        with pytest.raises(OSError):
            open_file(link)
    assert target.read_bytes() == b"precious"


def test_what_latest_says(tmp_path):
    assert latest_tag(tmp_path / "none") is None
    assert latest_tag(tmp_path) is None
    with pytest.raises(CheckpointError, match="has no file 'latest'"):
        Checkpoint.find(tmp_path)
    save_version(tmp_path, 1, "t1")
    save_version(tmp_path, 2, "t2")
    assert latest_tag(tmp_path) == "t2"
    assert tags(tmp_path) == ["t1", "t2"]
    with pytest.raises(CheckpointError, match="t3 is no checkpoint; there are t1, t2"):
        Checkpoint.find(tmp_path, "t3")
    for bad in (b"../t1", b"", b"\xff", b".hidden", b"a/b", b"t1\nt2\n", b"x" * 5000):
        (tmp_path / "latest").write_bytes(bad)
        with pytest.raises(CheckpointError, match="latest"):
            Checkpoint.find(tmp_path)
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    with pytest.raises(CheckpointError, match="latest"):
        Checkpoint.find(tmp_path)


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "latest", "x" * 300, "a\nb", ".saving-x", 3])
def test_tags_are_names_of_folders(tmp_path, tag):
    (error,) = save_version(tmp_path, 1, tag)
    assert isinstance(error, CheckpointError)
    assert "the tag is" in str(error)
    assert list(tmp_path.iterdir()) == []

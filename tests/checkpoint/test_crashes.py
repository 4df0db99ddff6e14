import copy
import errno
import functools
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from patrickstar.checkpoint import Checkpoint, CheckpointError, SaveOptions, file_stream, latest_tag, save, tags
from patrickstar.checkpoint.disk import Disk, locked
from patrickstar.checkpoint.export import ExportOptions, export
from patrickstar.checkpoint.folder import remove_checkpoint
from tests.checkpoint.ranks import Held, HeldSink, HeldSource, on_ranks

CALLS = [name for name in vars(Disk) if not name.startswith("_")]
KILLED, FINISHED = 77, 0


class FaultyDisk(Disk):
    """Calls ``fault(description)`` instead of the n-th call (and of all later ones with ``and_on``). Descriptors are
    closed anyway, as the system does.
    """

    def __init__(self, at, fault, and_on=False):
        self.count, self.names = 0, []
        self._at, self._fault, self._and_on = at, fault, and_on

    def before(self, name, where):
        self.count += 1
        self.names.append(name)
        if self.count == self._at or (self._and_on and self.count > self._at):
            self._fault(where)


def _faulty(name):
    def call(self, *args):
        if name == "close":  # some file systems report a full disk here
            Disk.close(self, *args)
            return self.before(name, args[0])
        self.before(name, args[0])
        return getattr(Disk, name)(self, *args)

    return call


for _name in CALLS:
    setattr(FaultyDisk, _name, _faulty(_name))


def tensors(version, num_ranks):
    cuts = [round(12 * rank / num_ranks) for rank in range(num_ranks + 1)]
    return [Held(f"p{index}", "master", torch.arange(12.0) + 100 * version + 1000 * index, cuts) for index in range(2)]


def save_version(path, version, tag, num_ranks=1, disk=None):
    held = tensors(version, num_ranks)  # here, since PyTorch refuses to compute in threads of a forked process

    def work(peers):
        options = SaveOptions(peers=peers, disk=disk or Disk(), max_file_bytes=40)
        return save(path, tag, HeldSource(held, peers.rank), {"version": version}, options)

    return on_ranks(num_ranks, work)


def loaded_version(path, tag=None):
    with Checkpoint.find(path, tag) as checkpoint:
        checkpoint.verify()
        version = checkpoint.manifest.state["version"]
        sink = HeldSink(tensors(version, 1), 0)
        checkpoint.load(sink)
        sink.check()
    return version


def in_a_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(FINISHED)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("tag", "others", "num_ranks"),
    [
        pytest.param("new", [], 1, marks=pytest.mark.slow),
        ("new", [], 2),
        pytest.param("old", [], 1, marks=pytest.mark.slow),
        ("old", [], 2),
        ("old", ["other"], 1),
    ],
)
def test_killed_at_every_call(tmp_path, tag, others, num_ranks):
    statuses = []
    versions = set()
    at = 0
    while FINISHED not in statuses:
        at += 1
        path = tmp_path / str(at)
        assert save_version(path, 1, "old", num_ranks) == [path / "old"] * num_ranks
        for other in others:
            save_version(path, 1, other)

        def killed(path=path, at=at):
            disk = FaultyDisk(at, lambda where: os._exit(KILLED))
            if any(isinstance(result, Exception) for result in save_version(path, 2, tag, num_ranks, disk)):
                os._exit(2)

        statuses.append(in_a_child(killed))
        assert statuses[-1] in (KILLED, FINISHED)
        versions.add(loaded_version(path))
        assert {loaded_version(path, found) for found in tags(path)} <= {1, 2}
        if tag == "new":
            assert loaded_version(path, "old") == 1
        assert len([left for left in path.iterdir() if left.name.startswith(".")]) <= 2
        # The next save succeeds and removes the rest.
        assert save_version(path, 3, "next") == [path / "next"]
        assert loaded_version(path) == 3
        assert not [left for left in path.iterdir() if left.name.startswith(".")]
    print(f"{tag}, beside {others}, {num_ranks} ranks: killed at {len(statuses) - 1} calls")
    assert len(statuses) > 20
    assert versions == {1, 2}


@pytest.fixture
def in_blocks(monkeypatch):
    """A thread writes files in blocks, as it does large ones. The system refuses such blocks as direct writes."""
    for name, value in {"_LEAST_BYTES": 0, "_BLOCK_BYTES": 16, "_BLOCKS": 2}.items():
        monkeypatch.setattr(file_stream, name, value)


def test_killed_at_every_call_in_blocks(tmp_path, in_blocks):
    test_killed_at_every_call(tmp_path, "old", [], 1)


def raising(code):
    def fault(where):
        raise OSError(code, os.strerror(code), *([str(where)] if isinstance(where, Path) else []))

    return fault


@pytest.mark.parametrize("and_on", [False, True], ids=["once", "from there on"])
@pytest.mark.parametrize(
    "code",
    [errno.ENOSPC, errno.EIO, *(pytest.param(code, marks=pytest.mark.slow) for code in (errno.EDQUOT, errno.EROFS))],
)
@pytest.mark.parametrize("tag", ["new", "old"])
def test_an_error_at_every_call(tmp_path, tag, code, and_on, caplog):
    at, outcomes, open_before = 0, [], len(list(Path("/proc/self/fd").iterdir()))
    names = {"latest", "old", tag}
    while outcomes[-1:] != ["saved"]:
        at += 1
        path = tmp_path / str(at)
        save_version(path, 1, "old")
        disk = FaultyDisk(at, raising(code), and_on)
        caplog.clear()
        (result,) = save_version(path, 2, tag, disk=disk)
        left = {found.name for found in path.iterdir()} - names
        told = [name for name in left if any(name in message for message in caplog.messages)]
        if isinstance(result, Exception):
            assert isinstance(result, CheckpointError), disk.names
            assert os.strerror(code) in str(result)
            assert str(tmp_path) in str(result).partition(os.strerror(code))[2]  # names the file
            outcomes.append("complete" if "is complete" in str(result) else "refused")
            if outcomes[-1] == "refused":
                assert loaded_version(path) == loaded_version(path, "old") == 1
                assert tags(path) == ["old"]
                assert and_on or not left
            else:
                assert loaded_version(path, tag) == 2
                assert loaded_version(path) in (1, 2)
                unknown = tag == "old" and disk.names[at - 1 :][0] == "sync_folder"
                assert and_on or bool(left) == unknown
                assert left == set(told)
        elif at <= disk.count:  # the faulty call was optional
            outcomes.append("saved all the same")
            assert loaded_version(path) == 2
            assert disk.names[at - 1] in ("remove_file", "remove_folder", "close")
            assert and_on or not left
            assert left == set(told) and (caplog.messages or disk.names[at - 1] != "close")
        else:
            outcomes.append("saved")
            assert not left and not caplog.messages
        assert save_version(path, 3, "next") == [path / "next"]
        assert not [left for left in path.iterdir() if left.name.startswith(".")]
    assert outcomes.count("refused") > 10
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_an_error_at_every_call_in_blocks(tmp_path, in_blocks, caplog):
    test_an_error_at_every_call(tmp_path, "old", errno.ENOSPC, False, caplog)


def test_killed_at_every_call_of_a_removal(tmp_path):
    statuses = []
    while FINISHED not in statuses:
        path = tmp_path / str(len(statuses))
        save_version(path, 1, "a", num_ranks=2)
        save_version(path, 2, "b")
        disk = FaultyDisk(len(statuses) + 1, lambda where: os._exit(KILLED))
        statuses.append(in_a_child(lambda path=path, disk=disk: remove_checkpoint(path / "a", disk)))
        assert {loaded_version(path, tag) for tag in tags(path)} <= {1, 2} and loaded_version(path, "b") == 2
        assert save_version(path, 3, "next") == [path / "next"]
        assert not [left for left in path.iterdir() if left.name.startswith(".")]
    assert len(statuses) > 4 and tags(path) == ["b", "next"]


def test_ranks_that_save_under_different_tags_are_told(tmp_path):
    held = tensors(1, 2)

    def work(peers):
        options = SaveOptions(peers=peers)
        return save(tmp_path, f"t{peers.rank}", HeldSource(held, peers.rank), {}, options)

    for error in on_ranks(2, work):
        assert isinstance(error, CheckpointError)
        assert f"different checkpoints: rank 0 {tmp_path}/t0, rank 1 {tmp_path}/t1" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_an_export_whose_name_may_be_lost_says_that_it_is_complete(tmp_path):
    shards = list(HeldSource(tensors(1, 1), 0).shards())

    class NoSync(Disk):
        def sync_folder(self, path):
            if path == tmp_path:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            super().sync_folder(path)

    with pytest.raises(CheckpointError, match=f"{tmp_path}/weights is complete, but may not outlast a power cut"):
        export(tmp_path / "weights", shards, ExportOptions(disk=NoSync()))
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["model.safetensors"]


def test_errors_of_closing_and_listing(tmp_path, monkeypatch):
    save_version(tmp_path, 1, "t")
    before, close = len(list(Path("/proc/self/fd").iterdir())), os.close

    def failing(fd):
        close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", failing)
        assert loaded_version(tmp_path) == 1
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    monkeypatch.setattr(Path, "iterdir", raising(errno.EIO))
    for call in (lambda: tags(tmp_path), lambda: Checkpoint.find(tmp_path)):
        with pytest.raises(CheckpointError, match=f"{tmp_path}.*{os.strerror(errno.EIO)}"):
            call()


class SmallDisk(Disk):
    """Limits the bytes in a folder; removing a file frees its bytes."""

    def __init__(self, folder, capacity):
        self._folder, self._capacity = folder, capacity

    def write(self, fd, data):
        if size_of(self._folder) + len(data) > self._capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data)


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_disk_that_fills_while_a_tag_is_replaced(tmp_path):
    save_version(tmp_path, 1, "old")
    save_version(tmp_path, 1, "other")
    present = size_of(tmp_path)
    needed = present + size_of(tmp_path / "old")
    for missing in (size_of(tmp_path / "old"), 100, 1):
        (error,) = save_version(tmp_path, 2, "old", disk=SmallDisk(tmp_path, needed - missing))
        assert isinstance(error, CheckpointError) and os.strerror(errno.ENOSPC) in str(error)
        assert size_of(tmp_path) == present and latest_tag(tmp_path) == "other"
        assert loaded_version(tmp_path, "old") == 1
    assert save_version(tmp_path, 2, "old", disk=SmallDisk(tmp_path, needed)) == [tmp_path / "old"]
    assert loaded_version(tmp_path) == 2 and latest_tag(tmp_path) == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "old", "other"]


def test_a_replaced_latest_is_not_written_again(tmp_path):
    class NoFiles(Disk):
        def rename(self, source, target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    save_version(tmp_path, 1, "t")
    assert save_version(tmp_path, 2, "t", disk=NoFiles()) == [tmp_path / "t"]
    assert loaded_version(tmp_path) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_lock_that_cannot_be_closed_is_told_in_the_log(tmp_path, fails, caplog):
    class Sticky(Disk):
        def create(self, path):
            if fails:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))
            return super().create(path)

        def close(self, fd):
            is_folder = Path(f"/proc/self/fd/{fd}").resolve() == tmp_path
            super().close(fd)
            if is_folder:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    (result,) = save_version(tmp_path, 1, "t", disk=Sticky())
    if fails:
        assert isinstance(result, CheckpointError) and os.strerror(errno.EDQUOT) in str(result)
    else:
        assert result == tmp_path / "t" and loaded_version(tmp_path) == 1
    assert f"{tmp_path} was locked, and its descriptor cannot be closed: {os.strerror(errno.EIO)}" in caplog.messages


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
    for bad in (b"../t1", b"", b"\xff", b".hidden", b"a/b", b"t1\nt2\n", b"t3\n", b"x" * 5000):
        (tmp_path / "latest").write_bytes(bad)
        with pytest.raises(CheckpointError, match="latest"):
            Checkpoint.find(tmp_path)
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    with pytest.raises(CheckpointError, match="latest"):
        Checkpoint.find(tmp_path)


def test_every_flipped_bit_of_latest_is_refused(tmp_path):
    neighbours = ["step0", "step2", "step3", "step5", "step9", "stdp1", "sTep1"]
    for tag in [*neighbours, "step1"]:
        save_version(tmp_path, 1, tag)
    file = tmp_path / "latest"
    data = file.read_bytes()
    assert data.splitlines()[0] == b"step1" and len(data.splitlines()) == 2
    for position in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=rf"{file} is damaged .* load one by its tag, there are .*, step9"):
            Checkpoint.find(tmp_path)
    for size in range(len(data)):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="load one by its tag"):
            Checkpoint.find(tmp_path)
    file.write_bytes(data)
    assert latest_tag(tmp_path) == "step1"


def test_a_latest_without_checksum_is_read_where_no_bit_can_be_wrong(tmp_path):
    for tag in ("step1", "step10", "step2", "step4"):
        save_version(tmp_path, 1, tag)
    for text in ("step1", "step1\n", "step10\n", "step2\n", "step4\n"):
        (tmp_path / "latest").write_text(text)
        assert latest_tag(tmp_path) == text.strip()
    save_version(tmp_path, 1, "step3")
    for tag in ("step1", "step2", "step3"):
        (tmp_path / "latest").write_text(f"{tag}\n")
        with pytest.raises(CheckpointError, match=rf"one changed bit makes '{tag}' of 'step\d'.* load one by its tag"):
            latest_tag(tmp_path)
    (tmp_path / "latest").write_text("step4\n")
    assert latest_tag(tmp_path) == "step4"


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "latest", "x" * 300, "a\nb", ".saving-x", 3])
def test_tags_are_names_of_folders(tmp_path, tag):
    (error,) = save_version(tmp_path, 1, tag)
    assert isinstance(error, CheckpointError)
    assert "the tag is" in str(error)
    assert list(tmp_path.iterdir()) == []


STATES_PER_PREFIX = 25
BLOCK = 64  # bytes that are written or not, in place of a disk's 4096


class File:
    def __init__(self, data=b"", synced=b""):
        self.data, self.synced = data, synced

    def after_a_cut(self, generator):
        if self.data == self.synced:
            return self.synced
        torn = generator.randrange(len(self.data) + 1) // BLOCK * BLOCK
        zeros = bytes(len(self.data))
        return generator.choice([self.synced, self.data, zeros, self.data[:torn], self.data[:torn] + zeros[torn:]])


class Folder:
    def __init__(self):
        self.history = [{}]
        """The folder's entries since the last sync, then after each change."""

    @property
    def entries(self):
        return self.history[-1]

    def put(self, changes):
        self.history.append({name: node for name, node in {**self.entries, **changes}.items() if node is not None})


class ModelledDisk(Disk):
    most_bytes = 100  # of a write

    def __init__(self, root):
        self.root, self.tree = root, Folder()
        self._open = {}
        self._load(root, self.tree)
        self.states = [copy.deepcopy(self.tree)]

    def _load(self, path, folder):
        for child in path.iterdir():
            node = Folder() if child.is_dir() else File(child.read_bytes(), child.read_bytes())
            if child.is_dir():
                self._load(child, node)
            folder.put({child.name: node})
        folder.history = folder.history[-1:]

    def _find(self, path):
        node = self.tree
        for name in path.relative_to(self.root).parts:
            node = node.entries[name]
        return node

    def _put(self, path, node):
        self._find(path.parent).put({path.name: node})

    def _note(self):
        self.states.append(copy.deepcopy(self.tree))

    def make_folder(self, path):
        super().make_folder(path)
        self._put(path, Folder())
        self._note()

    def create(self, path):
        fd = super().create(path)
        self._open[fd] = File()
        self._put(path, self._open[fd])
        self._note()
        return fd

    def write(self, fd, data):
        count = super().write(fd, data[: self.most_bytes])
        self._open[fd].data += bytes(data[:count])
        self._note()
        return count

    def write_at(self, fd, data, offset):
        count = super().write_at(fd, data[: self.most_bytes], offset)
        held = self._open[fd].data.ljust(offset, b"\0")
        self._open[fd].data = held[:offset] + bytes(data[:count]) + held[offset + count :]
        self._note()
        return count

    def sync(self, fd):
        super().sync(fd)
        self._open[fd].synced = self._open[fd].data
        self._note()

    def sync_folder(self, path):
        super().sync_folder(path)
        folder = self._find(path)
        folder.history = folder.history[-1:]
        self._note()

    def rename(self, source, target):
        super().rename(source, target)
        assert source.parent == target.parent
        self._find(source.parent).put({target.name: self._find(source), source.name: None})
        self._note()

    def exchange(self, one, other):
        super().exchange(one, other)
        self._find(one.parent).put({one.name: self._find(other), other.name: self._find(one)})
        self._note()

    def remove_file(self, path):
        super().remove_file(path)
        self._put(path, None)
        self._note()

    def remove_folder(self, path):
        super().remove_folder(path)
        self._put(path, None)
        self._note()


def after_a_cut(node, generator):
    """A file's bytes, or a folder's ``((name, node), ...)``."""
    if isinstance(node, File):
        return node.after_a_cut(generator)
    return tuple((name, after_a_cut(child, generator)) for name, child in generator.choice(node.history).items())


def write_state(state, path):
    if isinstance(state, bytes):
        path.write_bytes(state)
    else:
        path.mkdir()
        for name, child in state:
            write_state(child, path / name)


def cut_at_every_call(tmp_path, tag, make_disk=ModelledDisk, others=()):
    path = tmp_path / "saved"
    for present in ("old", *others):
        save_version(path, 1, present)
    disk = make_disk(path)
    save(path, tag, HeldSource(tensors(2, 1), 0), {"version": 2}, SaveOptions(disk=disk))
    generator = random.Random(0)
    expected = {"old": {1} if tag == "new" else {1, 2}, "new": {2}, "other": {1}}

    @functools.cache
    def version_of(state):
        left = tmp_path / "left"
        write_state(state, left)
        for found in tags(left):
            assert loaded_version(left, found) in expected[found]
        version = loaded_version(left)
        shutil.rmtree(left)
        return version

    return [version_of(after_a_cut(tree, generator)) for tree in disk.states for _ in range(STATES_PER_PREFIX)]


@pytest.mark.parametrize(("tag", "others"), [("new", []), ("old", []), ("old", ["other"])])
def test_after_a_power_cut(tmp_path, tag, others):
    versions = cut_at_every_call(tmp_path, tag, others=others)
    print(f"{tag}: {len(versions)} states of the disk, the old checkpoint in {versions.count(1)}")
    assert set(versions) == {1, 2}
    assert set(versions[-STATES_PER_PREFIX:]) == {2}


def test_after_a_power_cut_in_blocks(tmp_path, in_blocks):
    test_after_a_power_cut(tmp_path, "old", [])


@pytest.mark.parametrize("forgotten", ["sync", "sync_folder"])
def test_the_model_finds_a_forgotten_sync(tmp_path, forgotten):
    disk = type("Forgetful", (ModelledDisk,), {forgotten: lambda self, where: None})
    with pytest.raises(CheckpointError):
        cut_at_every_call(tmp_path, "new", disk)

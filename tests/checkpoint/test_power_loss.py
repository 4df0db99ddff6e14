"""Saves that a power cut ends. The disk model is a journaling file system: changes of a folder reach the disk in order,
up to any of those since its last sync. An unsynced file holds its old content, zeros, or a torn piece.
"""

import copy
import random
import shutil

import pytest

from patrickstar.checkpoint import CheckpointError, SaveOptions, save, tags
from patrickstar.checkpoint.disk import Disk
from tests.checkpoint.ranks import HeldSource
from tests.checkpoint.test_crashes import loaded_version, save_version, tensors

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
        """Its entries since the last sync, then after each change."""

    @property
    def entries(self):
        return self.history[-1]

    def put(self, changes):
        self.history.append({name: node for name, node in {**self.entries, **changes}.items() if node is not None})


class ModelledDisk(Disk):
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
        count = super().write(fd, data[:100])
        self._open[fd].data += bytes(data[:count])
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


def write_after_a_cut(node, path, generator):
    if isinstance(node, Folder):
        path.mkdir()
        for name, child in generator.choice(node.history).items():
            write_after_a_cut(child, path / name, generator)
    else:
        path.write_bytes(node.after_a_cut(generator))


def cut_at_every_call(tmp_path, tag, make_disk=ModelledDisk, others=()):
    path = tmp_path / "saved"
    for present in ("old", *others):
        save_version(path, 1, present)
    disk = make_disk(path)
    save(path, tag, HeldSource(tensors(2, 1), 0), {"version": 2}, SaveOptions(disk=disk))
    generator = random.Random(0)
    expected = {"old": {1} if tag == "new" else {1, 2}, "new": {2}, "other": {1}}
    versions = []
    for tree in disk.states:
        for _ in range(STATES_PER_PREFIX):
            left = tmp_path / "left"
            write_after_a_cut(tree, left, generator)
            versions.append(loaded_version(left))
            for found in tags(left):
                assert loaded_version(left, found) in expected[found]
            shutil.rmtree(left)
    return versions


@pytest.mark.parametrize(("tag", "others"), [("new", []), ("old", []), ("old", ["other"])])
def test_after_a_power_cut(tmp_path, tag, others):
    versions = cut_at_every_call(tmp_path, tag, others=others)
    print(f"{tag}: {len(versions)} states of the disk, the old checkpoint in {versions.count(1)}")
    assert set(versions) == {1, 2}
    assert set(versions[-STATES_PER_PREFIX:]) == {2}


@pytest.mark.parametrize("forgotten", ["sync", "sync_folder"])
def test_the_model_finds_a_forgotten_sync(tmp_path, forgotten):
    disk = type("Forgetful", (ModelledDisk,), {forgotten: lambda self, where: None})
    with pytest.raises(CheckpointError):
        cut_at_every_call(tmp_path, "new", disk)

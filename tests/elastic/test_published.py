import os

import pytest

from patrickstar.elastic import published
from patrickstar.elastic.movement import Move
from patrickstar.elastic.published import PublishedShards
from patrickstar.elastic.transfers import FileServer

MOVES = sorted(
    Move(source, target, param, 10 * param, 10 * param + size)
    for source, target in ((0, 1), (0, 2), (1, 2))
    for param, size in enumerate((5, 1, 7, 3, 9))
)
TOKEN, KEY = "0" * 32, bytes(32)
ARRAYS = {0: 3, 1: 3, 2: 1, 3: 3, 4: 1}


def content(piece):
    text = f"{piece.move.source}{piece.move.target}{piece.move.param}{piece.array}".encode()
    return text * piece.move.numel


def write(shards, rank):
    def fill(pieces, files):
        for descriptor, size in files:
            os.posix_fallocate(descriptor, 0, size)
        for piece in pieces:
            os.pwrite(files[piece.file][0], content(piece), piece.at)

    shards.write(rank, fill)


def check(shards, target):
    with shards.opened(target) as (pieces, files):
        assert sum(size for _, size in files) == sum(piece.move.numel * 4 for piece in pieces)
        wanted = {(move, array) for move in MOVES if move.target == target for array in range(ARRAYS[move.param])}
        assert {(piece.move, piece.array) for piece in pieces} == wanted
        for piece in pieces:
            assert os.pread(files[piece.file][0], piece.move.numel * 4, piece.at) == content(piece)


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(published, "_FILE_BYTES", 64)
    monkeypatch.setattr(published, "_MOST_FILES", 3)


@pytest.mark.usefixtures("small_files")
def test_several_files_of_each_pair_have_it_all_once(tmp_path):
    shards = PublishedShards(tmp_path, TOKEN, KEY, MOVES, ARRAYS)
    assert len(shards.files) == 6
    for file in shards.files:
        assert 64 <= file.num_bytes <= 120  # as even as whole moves are
    for rank in (0, 1):
        write(shards, rank)
    for target in (1, 2):
        shards.reach(target, [], 10)
        check(shards, target)
    shards.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_files")
def test_files_that_are_elsewhere_are_fetched_and_cut_ones_are_refused(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    shards, mine = (PublishedShards(folder, TOKEN, KEY, MOVES, ARRAYS) for folder in (there, here))
    write(shards, 0)
    write(mine, 1)
    server = FileServer("127.0.0.1", KEY, {file.name: shards.path(file) for file in shards.of_source(0)}, 10)
    try:
        mine.reach(2, [server.address, "127.0.0.1:1"], 10)
        check(mine, 2)
    finally:
        server.close()
    assert all(server.has_given(file.name, "2") == (file.target == 2) for file in shards.of_source(0))
    cut = next(file for file in mine.files if file.target == 2)
    os.truncate(mine.path(cut), cut.num_bytes - 1)
    with pytest.raises(OSError, match=f"bytes instead of {cut.num_bytes}"):
        mine.reach(2, ["127.0.0.1:1"] * 2, 10)


def test_little_is_one_file(tmp_path):
    assert [file.target for file in PublishedShards(tmp_path, TOKEN, KEY, MOVES, ARRAYS).files] == [1, 2, 2]

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patrickstar.planning.plan_cache import PlanCache, cache_folder, key_of
from patrickstar.planning.step_plan import Plan, PlannedChunk

CHUNK = PlannedChunk(numel=8, shard_numel=8, dtype="FLOAT32", trainable=True, states_on_device=False)
PLAN = Plan(
    chunks=(CHUNK,),
    timeline=[],
    steps=[],
    problem={"costs": {}, "limit_bytes": 1, "round_trip_costs": []},
    uploaded_bytes=0,
    downloaded_bytes=0,
    least_limit_bytes=0,
)


def plan_number(number):
    return dataclasses.replace(PLAN, uploaded_bytes=number)


def test_what_is_kept_is_found_again(tmp_path):
    cache = PlanCache(tmp_path / "not" / "there")
    key, other = key_of({"a": [1, None], "b": 2}), key_of({"a": [1, None], "b": 3})
    assert key == key_of({"b": 2, "a": [1, None]}) != other
    assert cache.load(key) is None
    cache.save(key, plan_number(1))
    cache.save(key, plan_number(2))
    assert cache.load(key) == plan_number(2)
    assert cache.load(other) is None
    assert [path.name for path in cache.folder.iterdir()] == [f"{key}.json"]


def test_the_least_lately_used_go(tmp_path):
    keys = [key_of({"number": number}) for number in range(6)]
    cache = PlanCache(tmp_path, most_entries=4)
    (tmp_path / "notes.txt").write_text("mine")
    for name, age in (("young", 10), ("old", 10_000)):
        path = tmp_path / f"{name}.unfinished"
        path.write_text("half")
        os.utime(path, (time.time() - age,) * 2)
    for age, key in enumerate(keys[:4]):
        cache.save(key, PLAN)
        os.utime(tmp_path / f"{key}.json", (1000 + age,) * 2)
    assert cache.load(keys[0]) == PLAN  # used now
    cache.save(keys[4], PLAN)
    assert [cache.load(key) is not None for key in keys] == [True, False, True, True, True, False]
    assert {path.name for path in tmp_path.iterdir() if ".json" not in path.name} == {"notes.txt", "young.unfinished"}
    size = (tmp_path / f"{keys[0]}.json").stat().st_size
    PlanCache(tmp_path, most_bytes=2 * size + 1).save(keys[5], PLAN)
    assert sum(cache.load(key) is not None for key in keys) == 2
    PlanCache(tmp_path, most_bytes=size - 1).save(keys[1], PLAN)
    assert cache.load(keys[1]) is None


def test_a_folder_that_cannot_be_used_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside", Path("/proc/nowhere")):
        cache = PlanCache(folder)
        cache.save(key_of({}), PLAN)
        assert cache.load(key_of({})) is None


_WRITER = """
import sys
from pathlib import Path
from patrickstar.planning.plan_cache import PlanCache
from tests.plan.test_plan_cache import KEYS, plan_number
cache = PlanCache(Path(sys.argv[1]), most_entries=2)
for number in range(50):
    for key in KEYS:
        cache.save(key, plan_number(number))
        found = cache.load(key)
        assert found is None or found == plan_number(found.uploaded_bytes), found
"""
KEYS = [key_of({"key": index}) for index in range(3)]


def test_processes_that_write_the_same_entries(tmp_path):
    command = [sys.executable, "-W", "error", "-c", _WRITER, str(tmp_path)]
    writers = [subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE) for _ in range(2)]
    cache = PlanCache(tmp_path)
    num_found = 0
    while any(writer.poll() is None for writer in writers):
        for key in KEYS:
            found = cache.load(key)
            num_found += found is not None
            assert found is None or found == plan_number(found.uploaded_bytes)
    for writer in writers:
        assert writer.communicate()[1] == b""
        assert writer.returncode == 0
    assert num_found > 0
    assert 1 <= len(list(tmp_path.iterdir())) <= 3
    assert all(path.suffix == ".json" for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("setting", "variable", "xdg", "folder"),
    [
        (None, None, None, "resting_tier/.cache/patrickstar"),
        (None, "", "", "resting_tier/.cache/patrickstar"),
        (True, "0", "relative", "resting_tier/.cache/patrickstar"),
        (None, "1", "/xdg", "/xdg/patrickstar"),
        (None, "0", "/xdg", None),
        (None, "/named", "/xdg", "/named"),
        (False, "/named", "/xdg", None),
        ("/chosen", "0", "/xdg", "/chosen"),
    ],
)
def test_which_folder(monkeypatch, tmp_path, setting, variable, xdg, folder):
    monkeypatch.setenv("HOME", str(tmp_path / "resting_tier"))
    for name, value in (("PATRICKSTAR_PLAN_CACHE", variable), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert cache_folder(setting) == (None if folder is None else tmp_path / folder)

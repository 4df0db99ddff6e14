import argparse
import json

import pytest

from benchmark import saves


def options(text):
    parser = argparse.ArgumentParser()
    saves.add_arguments(parser)
    return parser.parse_args(text.split())


@pytest.fixture(autouse=True)
def small_file(monkeypatch):
    monkeypatch.setattr(saves, "_DISK_BYTES", 64 * 2**20)


@pytest.mark.slow
def test_each_save_is_a_row(tmp_path):
    result = saves.run(options(f"--batch-size 2 --saves 1 --pairs 2 --folder {tmp_path}"))
    table = saves.format_table(result)
    print(table)
    assert result["failures"] == {}
    assert [(row["system"], row["kind"]) for row in result["rows"]] == [
        ("patrickstar", "sync"), ("patrickstar", "async"), ("DCP", "sync"), ("DCP", "async"),
    ]  # fmt: skip
    for row in result["rows"]:
        assert row["gb"] * 1e9 > result["num_bytes"][row["system"]] / 1.01
        assert 0 < row["waited"] <= row["complete"]
        assert (row["steps_during"] > 0) == (row["kind"] == "async")
    assert len(result["no_save"]) == 3 and table.count(" x") == 2
    assert not list(tmp_path.iterdir())
    json.dumps(result)


@pytest.mark.slow
def test_what_takes_too_long_leaves_a_table(tmp_path):
    result = saves.run(options(f"--timeout 0.5 --systems DCP --folder {tmp_path}"))
    assert result["rows"] == [] and "DCP ended: more than " in saves.format_table(result)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_must_fit_on_the_disk():
    saves.check_room("llama-8b-14-layers", 49_200_000_000, 60 * 2**30)
    with pytest.raises(SystemExit, match="takes 96.4 GB, .* has 64.4 GB free"):
        saves.check_room("llama-8b", 96_400_000_000, 60 * 2**30)

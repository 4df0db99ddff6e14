import argparse

import pytest

from benchmark import resize
from patrickstar.elastic import ResizePhase

SMALL = "--model tiny --length 16 --steps 1 --chunk-numel 65536 --timeout 120"


def options(text):
    parser = argparse.ArgumentParser()
    resize.add_arguments(parser)
    return parser.parse_args(text.split())


@pytest.mark.slow
def test_a_run_grows_and_shrinks_and_begins_again(capsys):
    result = resize.run(options(f"{SMALL} --restart both"))
    print(resize.format_table(result))
    assert result["failures"] == []
    assert [found["direction"] for found in result["resizes"]] == ["up", "down"]
    for found in result["resizes"]:
        assert 0 < found["seconds"] < 60 and len(found["step_seconds"]) == 4
        assert found["phases"].keys() == {phase.name.lower() for phase in ResizePhase}
        assert found["total_bytes"] > 5 * result["num_parameters"]  # nearly half of 12 bytes each
    assert [found["direction"] for found in result["restarts"]] == ["up", "down"]
    assert all(found["seconds"] > sum(found["parts"].values()) / 2 for found in result["restarts"])
    assert '"event": "resized"' in capsys.readouterr().err  # as it came


@pytest.mark.slow
def test_what_fails_leaves_what_came_before():
    result = resize.run(options(f"{SMALL} --timeout 0.5"))
    assert result["resizes"] == [] and result["failures"] == ["resize: more than 0.5 s"]
    assert "failed: resize: more than" in resize.format_table(result)


def test_there_are_more_ranks_to_change_to():
    with pytest.raises(SystemExit, match="give more ranks"):
        resize.run(options("--from 2 --to 2"))

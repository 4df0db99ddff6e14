import argparse

import pytest

from benchmark import long

pytestmark = pytest.mark.slow


def test_variants_have_the_same_losses():
    parser = argparse.ArgumentParser()
    long.add_arguments(parser)
    text = "--model tiny-llama --length 512 --steps 2 --tile-tokens 128 --device-memory 8MB --summary"
    result = long.run(parser.parse_args([*text.split(), "--keep-attention", "never", "always"]))
    print(long.format_table(result))
    assert [row["kept"] for row in result["rows"]] == ["never", "always"]
    for row in result["rows"]:
        assert row["gap"] == 0 and len(row["seconds"]) == 2
        assert "compute" in row["summary"]
    assert result["rows"][1]["stashed_bytes"] > 0

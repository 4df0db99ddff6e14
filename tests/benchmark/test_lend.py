import argparse
import json

from benchmark import lend


def test_a_loan_is_a_row_with_what_left(monkeypatch):
    monkeypatch.setattr(lend, "_STEPS_BEFORE", 3)
    monkeypatch.setattr(lend, "_STEPS_BETWEEN", 1)
    monkeypatch.setattr(lend, "_PIECE_NUMEL", 1024)
    parser = argparse.ArgumentParser()
    lend.add_arguments(parser)
    result = lend.run(parser.parse_args(["--batch-size", "2", "--loans", "2", "--device-memory", "4GiB"]))
    print(lend.format_table(result))
    assert len(result["rows"]) == 2
    assert all(row["bytes"] > 0 and min(row["left"], row["back"], row["step"]) > 0 for row in result["rows"])
    assert min(result["pytorch"].values()) > 0
    json.dumps(result)

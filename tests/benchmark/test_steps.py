import argparse
import json

from benchmark import steps


def test_each_step_is_a_row_with_what_the_engine_did_in_it():
    parser = argparse.ArgumentParser()
    steps.add_arguments(parser)
    text = '--batch-size 2 --steps 5 --clip 0.001 --trace 3 --further {"default_chunk_size":65536}'
    result = steps.run(parser.parse_args(text.split()))
    print(steps.format_table(result))
    rows = result["rows"]
    assert [row["step"] for row in rows] == list(range(5))
    assert all(row["norm"] > 0.001 and row["seconds"] > 0 for row in rows)
    assert sum(row["plans"] for row in rows) == result["report"]["num_plans"]
    assert list(result["traces"]) == [3] and "compute" in result["traces"][3]
    assert result["report"]["num_chunks"] > 5
    json.dumps(result)

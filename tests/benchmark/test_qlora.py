import argparse

import pytest

from benchmark import qlora

pytestmark = pytest.mark.slow

SMALL = "--shape tiny-llama --layers 2 --length 32 --batch-size 2 --micro-batch 1 --rank 4 --chunk-numel 16384"


def figures(text: str) -> dict:
    parser = argparse.ArgumentParser()
    qlora.add_arguments(parser)
    return qlora.run(parser.parse_args([*SMALL.split(), *text.split()]))


def test_a_budget_changes_no_loss_and_nothing_frozen_comes_down():
    result = figures("--steps 2 --warm-up 2 --device-memory 1MB --host-memory 64MB")
    print(qlora.format_table(result))
    budget, resident = result["rows"]
    assert [row["system"] for row in result["rows"]] == ["budget", "resident"]
    assert budget["losses"] == resident["losses"] and len(budget["seconds"]) == 4
    assert budget["frozen_uploaded_bytes"] > 0 == budget["frozen_downloaded_bytes"]
    assert resident["frozen_uploaded_bytes"] == resident["uploaded_bytes"] == 0
    assert budget["device_peak_bytes"] <= 1_000_000 < resident["device_peak_bytes"]
    assert budget["ratio"] > 0 and resident["ratio"] == 1
    assert resident["num_device_quantized_chunks"] == resident["num_quantized_chunks"]


def test_a_system_that_fails_leaves_the_others():
    result = figures("--steps 1 --warm-up 0 --device-memory 1KB")
    failed, resident = result["rows"]
    assert "device_memory" in failed["error"]
    assert len(resident["losses"]) == 1 and resident["ratio"] == 1
    assert failed["error"] in qlora.format_table(result)

import argparse
import math

from benchmark import adam


def test_all_passes_are_timed_and_agree_with_pytorch():
    result = adam.run(argparse.Namespace(numel=2**16, num_threads=1, repeats=1))
    times = [value for name, value in result.items() if name.endswith("ns_per_param")]
    assert len(times) == 11
    assert all(math.isfinite(value) and value > 0 for value in times)
    assert "between" in adam.format_table(result)

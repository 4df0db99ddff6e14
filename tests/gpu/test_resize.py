import pytest

from tests.elastic.test_resize import ON_HOST, alone, check
from tests.gpu.test_ranks import see_gpus

pytestmark = pytest.mark.gpu
CASES = {"on devices": (None, "fp32"), "on devices, split": (None, "bf16"), "on hosts": (ON_HOST, "bf16")}


def on_gpus(number):
    return alone(number) | see_gpus(number)


@pytest.mark.parametrize("name", CASES)
def test_one_two_and_one_rank(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path.with_name(f"{tmp_path.name}-home")))  # where the run's secret is
    optimizer, precision = CASES[name]
    tolerance = 1e-4 if precision == "fp32" else 0.1
    processes = check([1, 1, 2, 2, 1, 1], tmp_path, precision, tolerance, optimizer=optimizer, environment=on_gpus)
    assert {process["device"] for process in processes} == {"cuda"}

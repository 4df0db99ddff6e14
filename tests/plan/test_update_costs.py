import json
from pathlib import Path

import pytest

from benchmark.schemes import SCHEMES
from patrickstar import _C
from patrickstar.config import OptimizerType
from patrickstar.planning.machines import H200, given_host
from patrickstar.planning.update_costs import ADAM, update_cost

RECORD = Path(__file__).parents[2] / "benchmark" / "results" / "cpu-schemes.json"
RULES = {None: OptimizerType.ADAMW, _C.MomentumRule.LION: OptimizerType.LION, _C.MomentumRule.SGD: OptimizerType.SGD}


# ns per parameter of 15 hyper-threads beside an H200 (benchmark/results/h200-fewer-bytes.txt).
FIFTEEN_THREADS = {"adam, 8bit": 0.148, "adam, 8bit, no master": 0.145, "lion, 8bit, no master": 0.091}


def cost_of(scheme):
    return update_cost(_C.StateFormat(scheme.master, scheme.momentum, scheme.variance), RULES[scheme.rule])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_costs_are_those_that_were_measured(scheme):
    rows = {row["name"]: row for row in json.loads(RECORD.read_text())["schemes"]}
    cost, row = cost_of(scheme), rows[scheme.name]
    assert cost.traffic_bytes == row["bytes_per_param"]
    if scheme.name in FIFTEEN_THREADS:
        assert cost.core_seconds * 1e9 / 15 == pytest.approx(FIFTEEN_THREADS[scheme.name], rel=0.08)
    else:
        assert cost.core_seconds * 1e9 / 2 == pytest.approx(row["ns_per_param"], rel=0.06)


def test_memory_or_cores_hold_updates_up():
    costs = {scheme.name: cost_of(scheme) for scheme in SCHEMES}
    many = {name: H200.host_params_per_second(cost) for name, cost in costs.items()}
    assert many["adam, bf16"] == pytest.approx(5.2e9 * 28 / 20)
    assert many["adam, 8bit, no master"] == pytest.approx(15 / costs["adam, 8bit, no master"].core_seconds)
    few = given_host(H200, cores=3)
    assert few.host_params_per_second(costs["adam, 8bit"]) == pytest.approx(2 / costs["adam, 8bit"].core_seconds)
    assert few.host_params_per_second(costs["adam, 8bit"]) < few.host_params_per_second(ADAM)

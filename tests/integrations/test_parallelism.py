import pytest
from accelerate import ParallelismConfig

from patrickstar.integrations.accelerate import PatrickStarAccelerator
from patrickstar.integrations.decided_config import with_parallelism


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")


def test_sizes_are_sections_of_the_configuration():
    assert with_parallelism({"a": 1}, None) == {"a": 1}
    assert with_parallelism({"a": 1}, ParallelismConfig()) == {"a": 1}
    columns = {"tensor_parallel": {"columns": 2}}
    assert with_parallelism({}, ParallelismConfig(tp_size=2, dp_shard_size=2)) == columns
    given = {"tensor_parallel": {"rows": 2, "columns": "auto"}}
    assert with_parallelism(given, ParallelismConfig(tp_size=2)) == {"tensor_parallel": {"rows": 2, "columns": 2}}
    assert given["tensor_parallel"]["columns"] == "auto"
    assert with_parallelism({}, ParallelismConfig(cp_size=4)) == {"sequence_parallel": {"size": 4}}
    ulysses = {"sequence_parallel": {"size": 2, "mode": "ulysses"}}
    assert with_parallelism({}, ParallelismConfig(sp_size=2)) == ulysses
    assert with_parallelism({}, ParallelismConfig(sp_size=2, tp_size=2)) == ulysses | columns


@pytest.mark.parametrize(
    ("config", "sizes", "why"),
    [
        ({"tensor_parallel": {"columns": 4}}, {"tp_size": 2}, "tensor_parallel.columns is 4 in the configuration"),
        ({"sequence_parallel": {"size": 2, "mode": "ring"}}, {"sp_size": 2}, "sequence_parallel.mode is 'ring'"),
        ({}, {"tp_size": 2, "dp_shard_size": 4}, "for 8 ranks, and there are 4; leave dp_replicate_size"),
    ],
)
def test_what_does_not_go_together_is_refused(config, sizes, why):
    with pytest.raises(ValueError, match=why):
        with_parallelism(config, ParallelismConfig(**sizes))


def test_an_accelerator_takes_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    accelerator = PatrickStarAccelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    assert accelerator.ranks_per_sample == 2

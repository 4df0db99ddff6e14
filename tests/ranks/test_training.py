import itertools

import pytest
import torch

from patrickstar.config import parse_config
from patrickstar.engine import start as session_start
from patrickstar.ranks.context import DistributedContext
from patrickstar.ranks.distributed import RankGroups
from tests.bits import assert_same_bits, first_difference
from tests.distributed import rank_outcomes, run_ranks
from tests.ranks.managed import train_managed, train_managed_plain
from tests.ranks.runs import (
    Branches,
    Task,
    other_config,
    other_model,
    overflow_on_one_rank,
    run_out,
    shares_of_this_machine,
    times_of_whole_model,
    train,
    train_branches,
    train_branches_plain,
    train_plain,
    train_tasks,
    train_uneven,
    train_uneven_plain,
)
from tests.training import num_committed

MODELS = ["gpt2", "shared", "unused", "frozen", "mixture_of_experts", "t5"]
COUNT_THEIR_CALLS = ["unused"]  # and so see twice as many where one process plays both ranks
SMALL = {"device_memory": "1MB", "default_chunk_size": 16384}


def run(size, tasks):
    by_rank = run_ranks(size, train_tasks, tasks, timeout_seconds=300)
    return [[results[index] for results in by_rank] for index in range(len(tasks))]


def assert_same(one, other):
    assert one["losses"] == other["losses"]
    assert one["norms"] == other["norms"]
    assert_same_state(one["state"], other["state"])


def assert_same_state(one, other):
    assert_same_bits(one, other)


def relative_error(state, reference):
    names = [name for name, value in reference.items() if value.is_floating_point()]
    difference = sum(float((state[n].double() - reference[n].double()).square().sum()) for n in names)
    return (difference / sum(float(reference[n].double().square().sum()) for n in names)) ** 0.5


def test_two_ranks():
    tasks = []
    for model in MODELS:
        tasks.append(Task(model, options={"gradient_clipping": 1.0}))
        tasks.append(Task(model, options={"gradient_clipping": 1.0, **SMALL}))
        host = {"speculation": "always"}
        tasks.append(
            Task(model, on_host=True, optimizer=host, options={"gradient_clipping": 1.0, "default_chunk_size": 8192})
        )
    results = run(2, tasks)
    for index, model in enumerate(MODELS):
        unlimited, small, on_host = results[3 * index : 3 * index + 3]
        for ranks in (unlimited, small, on_host):
            assert_same_state(ranks[0]["state"], ranks[1]["state"])
            assert ranks[0]["norms"] == ranks[1]["norms"]
        for rank in range(2):
            assert_same(small[rank], unlimited[rank])
            assert_same(on_host[rank], unlimited[rank])
        assert small[0]["report"]["device_peak_bytes"] <= 1_000_000
        assert on_host[0]["report"]["num_device_state_chunks"] == 0
        if model in COUNT_THEIR_CALLS:
            continue
        error = relative_error(unlimited[0]["state"], train_plain(tasks[3 * index], 2))
        print(f"{model}: relative error to plain PyTorch {error:.2g}")
        assert error < 2e-6


def test_precisions_and_accumulation():
    tasks = []
    for precision in ("bf16", "fp16", "fp32"):
        for options in ({}, SMALL):
            tasks.append(Task("gpt2", precision, accumulate=2, options={"gradient_clipping": 1.0, **options}))
    tasks.append(Task("gpt2", "bf16", on_host=True, optimizer={"speculation": "commit"}))
    tasks.append(Task("gpt2", "bf16"))
    tasks.append(Task("gpt2", "bf16", optimizer={"speculation": "commit"}, options={"default_chunk_size": 16384}))
    tasks.append(Task("gpt2", "bf16", swaps=True))
    results = run(2, tasks)
    for first in (0, 2, 4, 6):
        for rank in range(2):
            assert_same(results[first][rank], results[first + 1][rank])
    for rank in range(2):
        assert_same(results[7][rank], results[8][rank])
        assert_same(results[7][rank], results[9][rank])
    for committed in (results[6][0]["report"], results[8][0]["report"]):
        assert num_committed(committed) > 0
    assert results[8][0]["report"]["num_device_state_chunks"] == results[8][0]["report"]["num_chunks"]
    assert relative_error(results[4][0]["state"], train_plain(tasks[4], 2)) < 2e-6


def test_four_ranks():
    tasks = [Task("conv_net"), Task("conv_net", options={"default_chunk_size": 4096}, on_host=True)]
    results = run(4, tasks)
    for rank in range(4):
        assert_same(results[1][rank], results[0][rank])
        for name, value in results[0][rank]["state"].items():
            if "running" not in name:  # all ranks take rank 0's when the next forward begins, as in DDP
                assert_same_bits(value, results[0][0]["state"][name], name)


def test_one_rank_is_one_process():
    task = Task("gpt2", "bf16", options={"gradient_clipping": 1.0})
    variables = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    alone = run_ranks(1, train, task, environment=lambda rank: dict.fromkeys(variables))[0]
    assert_same(run_ranks(1, train, task)[0], alone)


@pytest.mark.parametrize("swap_at", [100, 3])
def test_a_model_that_goes_otherwise_on_each_rank(swap_at):
    expected = train_branches_plain(2, swap_at)
    torch.manual_seed(0)
    Branches()
    next_number = torch.rand(()).item()
    one_chunk = {"default_chunk_size": 64 * 1024}
    for options, on_host in (({}, False), ({"device_memory": "200KB"}, False), (one_chunk, True)):
        by_rank = run_ranks(2, train_branches, options, on_host, swap_at, timeout_seconds=100)
        assert_same_state(by_rank[0]["state"], by_rank[1]["state"])
        assert relative_error(by_rank[0]["state"], expected) < 1e-6
        assert_same_bits(by_rank[0]["state"]["never.weight"], expected["never.weight"])
        assert [result["next_number"] for result in by_rank] == [next_number] * 2


def test_batches_of_uneven_size_count_as_in_ddp():
    expected = train_uneven_plain()
    results = run_ranks(2, train_uneven, timeout_seconds=100)
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(expected["losses"][rank], rel=1e-5)
        assert_same_state(result["state"], results[0]["state"])
    error = relative_error(results[0]["state"], expected["state"])
    print(f"relative error to plain PyTorch {error:.2g}")
    assert error < 2e-6


SHARED = parse_config({"client": {"mem_tracer": {"use_fake_dist": True}}})


def test_ranks_share_gpus_where_they_are_told_to(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert [session_start._device(local_rank, SHARED).index for local_rank in range(4)] == [0, 1, 0, 1]
    with pytest.raises(ValueError, match=r"local_rank is 2, but this process sees 2 GPUs.*use_fake_dist"):
        session_start._device(2, parse_config({}))


def test_ranks_that_find_themselves_on_one_gpu_are_refused():
    context = DistributedContext(world_size=2, local_world_size=2, device=torch.device("cuda", 0), num_device_ranks=2)
    ranks = RankGroups(context, (0, 1), 1.0)
    session_start._check_sharing(ranks, SHARED)
    with pytest.raises(ValueError, match=r"2 ranks of this run compute on one GPU \(cuda:0 of rank 0\).*use_fake_dist"):
        session_start._check_sharing(ranks, parse_config({}))


def test_parameters_that_stay_with_pytorch():
    ranks = run_ranks(2, train_managed, timeout_seconds=100)
    states = [result["state"] for result in ranks]
    expected = train_managed_plain(2)
    for name, value in states[0].items():
        assert (first_difference(value, states[1][name]) is None) == (not name.startswith("own.")), name
    shared = [name for name in expected if not name.startswith("own.")]
    assert relative_error({n: states[0][n] for n in shared}, {n: expected[n] for n in shared}) < 1e-6
    torch.testing.assert_close(states[0]["modes"], expected["modes"], rtol=1e-5, atol=1e-6)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    first, second = run_ranks(2, overflow_on_one_rank, timeout_seconds=100)
    assert first["skipped"] == second["skipped"]
    assert first["skipped"][-1] > 0
    assert first["scales"] == second["scales"]
    assert_same_state(first["state"], second["state"])


@pytest.mark.parametrize(
    ("function", "what"), [(other_config, "gradient_clipping"), (other_model, "the model's parameters")]
)
def test_ranks_that_disagree_are_told_so(function, what):
    for outcome in rank_outcomes(2, function, timeout_seconds=60):
        assert "DisagreementError" in outcome.error
        assert what in outcome.error


def test_bytes():
    """Per step every value is gathered twice (forward and backward) and every gradient scattered once, each time the
    other ranks' share; with room for everything each value is gathered once.
    """
    scarce = Task(
        "gpt2", "bf16", steps=6, options={"device_memory": "600KB", "default_chunk_size": 16384}, on_host=True
    )
    ample = Task("gpt2", "bf16", steps=6, on_host=True)
    frugal = Task("gpt2", "bf16", steps=3, on_host=True, optimizer={"speculation": "never"})
    *results, on_host = run(2, [scarce, ample, frugal])
    for task_results, gathers in zip(results, (2, 1), strict=True):
        report = task_results[0]["report"]
        chunk_bytes = report["num_chunk_elements"] * 2
        assert report["scattered_bytes"] == 6 * chunk_bytes // 2
        assert report["gathered_bytes"] <= gathers * 6 * chunk_bytes // 2
        print(f"gathered {report['gathered_bytes'] / (6 * chunk_bytes / 2):.2f} x (p - 1) / p of the values per step")
    assert results[1][0]["report"]["gathered_bytes"] == 6 * results[1][0]["report"]["num_chunk_elements"]
    for result in on_host:  # each rank's share of 14 bytes per parameter: a gradient takes its parameters' place
        report = result["report"]
        print(f"host: {report['host_peak_bytes'] / report['num_chunk_elements']:.2f} bytes per parameter and rank")
        assert report["host_peak_bytes"] <= 14 * report["num_chunk_elements"] / 2


def test_ranks_of_a_machine_divide_it():
    alone = run_ranks(1, shares_of_this_machine, timeout_seconds=60)[0]
    for rank in run_ranks(2, shares_of_this_machine, timeout_seconds=60):
        assert rank["host_budget_bytes"] == pytest.approx(alone["host_budget_bytes"] / 2, rel=0.05)
        assert rank["num_host_threads"] == max(1, alone["num_host_threads"] // 2)


@pytest.mark.parametrize("release_after_init", [False, True])
def test_one_whole_model_at_a_time(release_after_init):
    by_rank = run_ranks(3, times_of_whole_model, release_after_init, 2, timeout_seconds=100)
    for times in zip(*by_rank, strict=True):
        overlaps = [later[0] < earlier[1] for earlier, later in itertools.pairwise(sorted(times))]
        assert overlaps == [release_after_init] * 2


@pytest.fixture(scope="module")
def undisturbed():
    return {limit: run_ranks(2, run_out, set(), limit, timeout_seconds=100) for limit in (None, 170_000)}


@pytest.mark.parametrize("limit", [None, 170_000])
@pytest.mark.parametrize(
    "failures",
    [
        pytest.param({1, 2, 6}, id="while ranks negotiate"),
        pytest.param({3}, id="in a replay"),
        pytest.param({3, 4, 6, 8}, id="twice, in an evaluation, in a later replay"),
    ],
)
def test_a_forward_that_ran_out_of_memory_is_repeated(failures, limit, undisturbed):
    repeated = run_ranks(2, run_out, failures, limit, timeout_seconds=100)
    assert [result["calls"] for result in repeated] == [5, 5 + len(failures)]
    for one, other in zip(undisturbed[limit], repeated, strict=True):
        assert one["losses"] == other["losses"]
        assert_same_state(one["state"], other["state"])
        print(one["replayed"], other["replayed"])
        assert other["replayed"] >= one["replayed"] / 2


def test_a_forward_is_repeated_in_a_first_step_that_replays_a_kept_plan(tmp_path, undisturbed):
    run_ranks(2, run_out, set(), 170_000, str(tmp_path), timeout_seconds=100)
    repeated = run_ranks(2, run_out, {1}, 170_000, str(tmp_path), timeout_seconds=100)
    assert [result["calls"] for result in repeated] == [5, 6]
    for one, other in zip(undisturbed[170_000], repeated, strict=True):
        assert one["losses"] == other["losses"]
        assert_same_state(one["state"], other["state"])
        assert other["replayed"] > one["replayed"]  # three steps, then part of the first one too

from typing import Any

import pytest
import torch
import torch.distributed as dist

from patrickstar import _C
from patrickstar.profiling import chrome_trace, summarize
from patrickstar.profiling.picture import memory_bands
from patrickstar.ranks.distributed import open_ranks
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import rank_outcomes, run_ranks
from tests.models import MODELS, Case, gpt2, token_batch
from tests.plan.test_timed_planner import linked
from tests.profiling.traces import median_gbps, total_bytes
from tests.ranks.runs import rank_and_size, rows
from tests.training import make_config

pytestmark = pytest.mark.slow

STEPS = 7
MEASURED = 1  # the second step: the first one makes optimizer states
SMALL = {"device_memory": "1MB", "default_chunk_size": 16384}
LAYERS = Case(lambda: gpt2(hidden=64, layers=4), token_batch)


def train(config: dict[str, Any], *, case: Case = LAYERS, ask_at: tuple[int, ...] = (), in_backward: bool = False):
    """After each step the plan and its times. ``ask_at[rank]``: the step that a user traces on this rank, requested
    before it or in its backward.
    """
    rank, _ = rank_and_size()
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(case.build, 0, config)
    runtime = engine._session.runtime
    losses, plans, traces = [], [], []
    with engine:
        engine.train()
        generator = torch.Generator().manual_seed(1)
        for step in range(STEPS):
            asks = ask_at and step == ask_at[rank]
            if asks and not in_backward:
                runtime.start_trace()
            loss = case.loss(engine(**rows(case.batch(generator))))
            if asks and in_backward:
                runtime.start_trace()
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            plan = engine.plan()
            plans.append((plan.times, plan.steps, plan.prediction, plan.problem["prefetch_bytes"]))
            traces.append(runtime.take_trace())
        layers = engine._session.chunk_layers
        return {"losses": losses, "state": engine.state_dict(), "plans": plans, "traces": traces, "layers": layers}


def train_all(configs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    dist.init_process_group("gloo")  # once for all engines
    results = [train(config, case=MODELS[name]) for name, config in configs]
    dist.barrier()
    dist.destroy_process_group()
    return results


def plain(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "delays"}


def assert_same_training(one, other):
    assert one["losses"] == other["losses"]
    assert_same_bits(one["state"], other["state"])


def test_all_ranks_choose_the_same_plan_and_no_number_depends_on_it():
    configs = []
    for name in ("gpt2", "t5", "frozen"):
        for speculation in ("never", "always"):
            configs.append((name, linked(0.5, speculation=speculation, **SMALL)))
    expected = run_ranks(2, train_all, [(name, plain(config)) for name, config in configs], timeout_seconds=200)
    found = run_ranks(2, train_all, configs, timeout_seconds=200)
    for first, second, *untimed in zip(*found, *expected, strict=True):
        assert first["plans"] == second["plans"]
        assert [times is not None for times, *_ in first["plans"]] == [step > MEASURED for step in range(STEPS)]
        assert all(times is None for times, *_ in untimed[0]["plans"])
        assert_same_training(first, untimed[0])
        assert_same_training(second, untimed[1])


def measured(trace):
    spans = trace["spans"]
    kept = (_C.StallCause.NORM, _C.StallCause.HOST_WORK)
    stalls = [s for s in spans if s["track"] == _C.Track.STALL and s["cause"] not in kept]
    compute = []
    for access in trace["accesses"]:
        end = min(access["begin_seconds"] + access["seconds"], trace["optimizer_begin_seconds"])
        waits = (s["seconds"] for s in stalls if access["begin_seconds"] <= s["begin_seconds"] < end)
        compute.append(access["seconds"] - sum(waits))
    rates = {
        track: median_gbps(spans, getattr(_C.Track, track)) for track in ("UPLOAD", "DOWNLOAD", "GATHER", "SCATTER")
    }
    return rates, compute


def test_the_slowest_rank_counts():
    ranks = run_ranks(2, train_asking, (MEASURED, MEASURED), False, timeout_seconds=100)
    (rates, compute), (other_rates, other_compute) = (measured(rank["traces"][MEASURED]) for rank in ranks)
    times = ranks[0]["plans"][-1][0]
    print({name: (f"{rates[name]:.3g}", f"{other_rates[name]:.3g}") for name in rates})
    assert times.rates["upload_gbps"] == pytest.approx(min(rates["UPLOAD"], other_rates["UPLOAD"]))
    assert times.rates["download_gbps"] == pytest.approx(min(rates["DOWNLOAD"], other_rates["DOWNLOAD"]))
    assert times.rates["gather_gbps"] == pytest.approx(max(rates["GATHER"], other_rates["GATHER"]))
    assert times.rates["scatter_gbps"] == pytest.approx(max(rates["SCATTER"], other_rates["SCATTER"]))
    slowest = [max(pair) for pair in zip(compute, other_compute, strict=True)]
    assert times.compute_seconds == pytest.approx(slowest, abs=1e-9)


def test_a_profile_shows_collectives():
    first = run_ranks(2, train_asking, (1, STEPS), False, timeout_seconds=100)[0]
    trace, layers = first["traces"][1], first["layers"]
    summary = summarize(trace)
    assert summary.gather.amount > summary.scatter.amount > 0
    assert "gather" in summary.roofline
    lines = [line.split()[0] for line in summary.text(2).splitlines()]
    assert lines[lines.index("download") :][1:3] == ["gather", "scatter"]
    rows = [e["args"]["name"] for e in chrome_trace(trace, 2, layers)["traceEvents"] if e["name"] == "thread_name"]
    assert {"gather stream", "scatter stream"} < set(rows)
    columns = [sum(column) for column in zip(*memory_bands(trace).values(), strict=True)]
    assert columns == [total_bytes(access) for access in trace["accesses"]]
    spans = [span for span in trace["spans"] if span["track"] in (_C.Track.GATHER, _C.Track.SCATTER)]
    assert all(span["num_bytes"] > 0 and span["seconds"] > 0 for span in spans)


def train_asking(ask_at: tuple[int, ...], in_backward: bool) -> dict[str, Any]:
    return train(linked(0.5, **SMALL), ask_at=ask_at, in_backward=in_backward)


def test_a_rank_that_is_measured_later_is_waited_for():
    first, second = run_ranks(2, train_asking, (STEPS, MEASURED), True, timeout_seconds=100)
    assert first["plans"] == second["plans"]
    assert [times is not None for times, *_ in first["plans"]] == [step > MEASURED + 1 for step in range(STEPS)]


def test_plans_that_ranks_do_not_share_are_refused(tmp_path):
    path = str(tmp_path / "plan.json")
    run_ranks(2, save_plan, path, timeout_seconds=100)
    for outcome in rank_outcomes(2, train_with_plan_on_rank_0, path, timeout_seconds=60):
        assert "DisagreementError: ranks disagree on the plan to begin with" in outcome.error
    assert (
        "is a plan for 2 ranks, this run has 1" in rank_outcomes(1, train_with_plan, path, timeout_seconds=60)[0].error
    )
    for outcome in rank_outcomes(2, have_different_plans, timeout_seconds=60):
        assert "StateError: the ranks came to have different plans" in outcome.error
        assert "rank 0 has 0000000000000000, rank 1 has 0000000000000001" in outcome.error


def have_different_plans() -> None:
    with open_ranks() as ranks:
        collectives = _C.Collectives(ranks.gather, ranks.scatter, ranks.control)
        collectives.check_same_plan(7)
        collectives.check_same_plan(rank_and_size()[0])


def save_plan(path: str) -> None:
    engine, optimizer = initialize_engine(LAYERS.build, 0, make_config("bf16", **SMALL))
    with engine:
        engine.train()
        engine.backward(LAYERS.loss(engine(**token_batch(torch.Generator().manual_seed(1)))))
        optimizer.step()
        if rank_and_size()[0] == 0:
            engine.plan().save(path)


def train_with_plan(path: str) -> None:
    train(make_config("bf16", **SMALL, plan=path))


def train_with_plan_on_rank_0(path: str) -> None:
    train(make_config("bf16", **SMALL, **({"plan": path} if rank_and_size()[0] == 0 else {})))

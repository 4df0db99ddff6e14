import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import torch

from patrickstar.planning.step_plan import Plan
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.models import LENGTH, MODELS, VOCAB, Case, gpt2
from tests.ranks.runs import Task, rank_and_size
from tests.ranks.runs import train as train_rank
from tests.training import assert_same, least_device_memory, make_config, train

STEPS = 4
CASE = MODELS["gpt2"]


def tokens(batch, length=LENGTH):
    def make(generator):
        ids = torch.randint(0, VOCAB, (batch, length), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return make


@pytest.fixture(scope="module")
def least():
    config = make_config(default_chunk_size=4096)
    return {batch: least_device_memory(Case(gpt2, tokens(batch)), config, steps=STEPS) for batch in (4, 16)}


@pytest.fixture
def config(tmp_path, least):
    return make_config(default_chunk_size=4096, device_memory=2 * least[4], plan_cache=str(tmp_path / "plans"))


def replayed(run, step=0):
    before = run.chunk_reports[step - 1] if step > 0 else {"num_replayed_accesses": 0, "num_accesses": 0}
    now = run.chunk_reports[step]
    return (now["num_replayed_accesses"] - before["num_replayed_accesses"]) / (
        now["num_accesses"] - before["num_accesses"]
    )


def entries(config):
    return sorted(Path(config["plan_cache"]).glob("*"))


def cold_and_warm(config, case=CASE, **kwargs):
    cold, warm = (train(case, config, steps=STEPS, **kwargs) for _ in range(2))
    assert_same(cold, warm)
    assert cold.grad_norms == warm.grad_norms
    return cold, warm


@pytest.mark.parametrize("name", ["gpt2", "t5", "lora", "frozen", "shared"])
def test_a_second_run_replays_from_its_first_step_on(config, name):
    cold, warm = cold_and_warm(config, MODELS[name])
    assert replayed(cold) == 0
    assert replayed(warm) == 1
    assert len(entries(config)) == 1
    for report in warm.chunk_reports:
        assert report["device_peak_bytes"] <= report["device_budget_bytes"]
    assert_same(warm, train(MODELS[name], {**config, "plan_cache": False}, steps=STEPS))


@pytest.mark.parametrize("times", [False, True])
def test_a_run_with_measured_times_keeps_them(config, times):
    if times:
        config |= {"delays": {"link_gbps": 0.5}}
        config["optimizer"]["params"]["use_hybrid_adam"] = False
    for kept in (False, times):
        seen = {}

        def look(engine, step, seen=seen):
            if step == 1:
                seen["times"] = engine.plan().times

        train(CASE, config, steps=8, before_step=look)
        assert (seen["times"] is not None) == kept
        (entry,) = entries(config)
        kept_plan = Plan.from_json(entry.read_text().partition("\n")[2], "entry")
        assert (kept_plan.times is not None) == times


def test_a_short_run_keeps_its_plan_when_it_is_closed(config):
    train(CASE, config, steps=1)
    assert replayed(train(CASE, config, steps=2)) == 1


def other_runs(config):
    yield Case(gpt2, tokens(3)), {}
    yield Case(gpt2, tokens(2, 8)), {}
    yield Case(lambda: gpt2(layers=3), CASE.batch), {}
    yield Case(lambda: gpt2(hidden=64), CASE.batch), {"device_memory": 4 * config["device_memory"]}
    yield CASE, {"device_memory": config["device_memory"] + 4096}
    yield CASE, {"host_memory": 2**30}
    yield CASE, {"default_chunk_size": 64 * 1024, "device_memory": "1GB"}
    yield CASE, {"bf16": {"enabled": True}}
    yield CASE, {"optimizer": {"params": {"use_hybrid_adam": False}}}


def test_another_run_plans_anew(config):
    train(CASE, config, steps=STEPS)
    for count, (case, keys) in enumerate(other_runs(config), start=2):
        run = train(case, {**config, **keys}, steps=STEPS)
        assert replayed(run) == 0, keys
        assert len(entries(config)) == count, keys
    assert replayed(train(CASE, config, steps=STEPS)) == 1


def test_a_compiled_run_plans_anew(config):
    plain = train(CASE, config, steps=STEPS)
    compiled = train(CASE, config, steps=STEPS, before_step=compile_first)
    assert len(entries(config)) == 2
    assert replayed(compiled) == replayed(plain) < 0.9
    again = train(CASE, config, steps=STEPS, before_step=compile_first)
    assert len(entries(config)) == 2 and replayed(again) > replayed(compiled)


def compile_first(engine, step):
    if step == 0:
        engine.compile(backend="aot_eager")


def damaged(text):
    digest, _, plan = text.partition("\n")
    yield ""
    yield "\x00" * 100
    yield text[:-10]
    yield f"{digest}\n{plan.replace('PARAM', 'GRAD', 1)}"
    for other in ('{"format": "patrickstar.plan", "version": 99}', "[]", _of_another_layout(plan)):
        yield f"{hashlib.sha256(other.encode()).hexdigest()}\n{other}"


def _of_another_layout(plan):
    fields = json.loads(plan)
    fields["chunks"][0]["numel"] += 1
    return json.dumps(fields)


def test_what_is_no_plan_of_this_run_is_replaced(config):
    cold = train(CASE, config, steps=STEPS)
    (entry,) = entries(config)
    for text in damaged(entry.read_text()):
        entry.write_text(text)
        run = train(CASE, config, steps=STEPS)
        assert_same(run, cold)
        assert replayed(run) == 0
        assert replayed(train(CASE, config, steps=2)) == 1
    assert entries(config) == [entry]


def test_switched_off(config, tmp_path, monkeypatch):
    plans = []
    train(CASE, {**config, "plan_cache": False}, before_step=lambda engine, step: plans.append(step and engine.plan()))
    plans[-1].save(tmp_path / "plan.json")
    del config["plan_cache"]
    train(CASE, config, steps=2)  # the environment of the tests
    monkeypatch.setenv("PATRICKSTAR_PLAN_CACHE", str(tmp_path / "named"))
    train(CASE, {**config, "plan_cache": False}, steps=2)
    run = train(CASE, {**config, "plan": str(tmp_path / "plan.json")}, steps=2)
    assert replayed(run) == 1
    assert not (tmp_path / "named").exists()
    assert replayed(train(CASE, config, steps=2)) == 0
    assert replayed(train(CASE, config, steps=2)) == 1


def train_by_functions(config, batches):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(gpt2, 0, config)
    with engine:
        engine.train()
        generator = torch.Generator().manual_seed(1)
        losses = []
        for batch in batches:
            inputs = tokens(batch)(generator)
            loss = engine.run_forward(lambda inputs=inputs: engine.module(**inputs).loss)
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            report = engine.report()
            assert report["device_peak_bytes"] <= report["device_budget_bytes"]
            del loss
        return losses, report["num_replayed_accesses"]


@pytest.mark.parametrize("percent", [100, 105, 130])
def test_longer_batches_than_those_of_the_kept_plan(config, least, percent):
    config["device_memory"] = least[16] * percent // 100
    expected, _ = train_by_functions({**config, "plan_cache": False}, [16, 4, 16])
    train_by_functions(config, [4, 4, 4])
    assert len(entries(config)) == 1
    warm, num_replayed = train_by_functions(config, [16, 4, 16])
    assert warm == expected
    assert num_replayed > 0


def train_twice(config):
    if rank_and_size()[0] > 0:
        config = {**config, "plan_cache": False}
    task = Task(CASE, steps=STEPS, options=config)
    torch.distributed.init_process_group("gloo")
    runs = []
    for _ in range(2):
        first = train_rank(dataclasses.replace(task, steps=1))["report"]
        runs.append((train_rank(task), first["num_replayed_accesses"] / first["num_accesses"]))
    torch.distributed.destroy_process_group()
    return runs


def test_two_ranks_begin_with_the_first_ones_plan(tmp_path):
    config = {"default_chunk_size": 4096, "device_memory": "500KB", "plan_cache": str(tmp_path)}
    for (cold, first), (warm, second) in run_ranks(2, train_twice, config, timeout_seconds=100):
        assert (first, second) == (0, 1)
        assert cold["losses"] == warm["losses"]
        assert_same_bits(cold["state"], warm["state"])
    assert len(list(tmp_path.iterdir())) == 1

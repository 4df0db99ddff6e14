import json

import pytest
import torch

from patrickstar import _C, StateError
from patrickstar.plan import Plan, predict
from patrickstar.planning.step_plan import VERSION
from patrickstar.runtime import initialize_engine
from tests.models import MODELS
from tests.training import assert_same, least_device_memory, make_config, train

STEPS = 4


def small_chunks(**config):
    return make_config(default_chunk_size=4096, **config)


def run_and_plan(case, config, steps=STEPS):
    plans = []

    def look(engine, step):
        if step > 0:
            plans[:] = [engine.plan()]

    return train(case, config, steps=steps, before_step=look), plans[0]


@pytest.fixture(scope="module", params=["mlp", "gpt2"])
def planned(request, tmp_path_factory):
    case = MODELS[request.param]
    config = small_chunks()
    config["device_memory"] = least_device_memory(case, config) * 5 // 4
    run, plan = run_and_plan(case, config)
    path = tmp_path_factory.mktemp("plans") / f"{request.param}.json"
    plan.save(path)
    return case, config, run, plan, path


def test_round_trip(planned):
    *_, plan, path = planned
    assert Plan.load(path) == plan


def test_it_says_what_moves(planned):
    *_, plan, _ = planned
    text = str(plan)
    assert f"plan of {len(plan.timeline)} accesses over {len(plan.chunks)} chunks" in text
    assert len(text.splitlines()) == len(plan.timeline) + 3
    assert any(step["prefetch"] or step["fetch"] for step in plan.steps)


def test_a_new_engine_replays_it_from_the_first_step_on(planned):
    case, config, run, plan, path = planned
    first = {}

    def look(engine, step):
        if step == 0:
            first["plan"] = engine.plan()
        elif step == 1:
            first["report"] = engine.report()

    replayed = train(case, {**config, "plan": str(path)}, steps=STEPS, before_step=look)
    assert_same(run, replayed)
    assert first["plan"].steps == plan.steps
    assert first["plan"].problem == plan.problem
    assert first["report"]["num_replayed_accesses"] == first["report"]["num_accesses"] == len(plan.timeline)
    assert run.chunk_reports[0]["num_replayed_accesses"] == 0


@pytest.mark.parametrize("percent", [82, 130, 200])
def test_other_budgets_change_no_number(planned, percent):
    case, config, run, _plan, path = planned
    other = {**config, "plan": str(path), "device_memory": config["device_memory"] * percent // 100}
    assert_same(run, train(case, other, steps=STEPS))


def test_a_departing_sequence_changes_no_number(planned, tmp_path):
    case, config, run, plan, path = planned
    fields = json.loads(path.read_text())
    fields["timeline"] = fields["timeline"][::-1]
    fields["steps"] = fields["steps"][::-1]
    other = tmp_path / "reversed.json"
    other.write_text(json.dumps(fields))
    replayed = train(case, {**config, "plan": str(other)}, steps=STEPS)
    assert_same(run, replayed)
    report = replayed.chunk_reports[0]
    assert report["num_replayed_accesses"] < report["num_accesses"]
    assert replayed.chunk_reports[-1]["num_plans"] > 1


def test_a_step_is_predicted_from_the_plan_of_an_engine(planned):
    *_, plan, _ = planned
    seconds = [0.001 * (index + 1) for index in range(len(plan.timeline))]
    rates = _C.Rates()
    rates.upload_gbps = rates.download_gbps = rates.host_adam_params_per_second = 1e18
    rates.device_adam_params_per_second = 1e18
    assert predict(plan, seconds, rates).seconds == pytest.approx(sum(seconds), rel=1e-6)
    rates.upload_gbps = rates.download_gbps = 1e-3
    slow = predict(plan, seconds, rates)
    assert slow.seconds > sum(seconds)
    assert slow.roofline["upload"] == pytest.approx(plan.uploaded_bytes / 1e6)
    assert (slow.uploaded_bytes, slow.downloaded_bytes) == (plan.uploaded_bytes, plan.downloaded_bytes)
    assert slow.peak_bytes <= plan.problem["limit_bytes"]
    with pytest.raises(ValueError, match="accesses"):
        predict(plan, seconds[1:], rates)


def test_another_layout_is_refused(planned):
    _case, config, _run, plan, path = planned
    with pytest.raises(ValueError, match=rf"is a plan for {len(plan.chunks)} chunks, this engine has"):
        initialize_engine(MODELS["bert"].build, 0, {**config, "plan": str(path)})
    # The refused engine does not block the next one.
    torch.manual_seed(0)
    engine, _ = initialize_engine(MODELS["mlp"].build, 0, small_chunks())
    engine.close()


def test_other_chunks_of_the_same_number_are_refused(planned, tmp_path):
    case, config, _run, _plan, path = planned
    fields = json.loads(path.read_text())
    fields["chunks"][1]["numel"] += 1
    other = tmp_path / "other.json"
    other.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="its chunk 1 has"):
        initialize_engine(case.build, 0, {**config, "plan": str(other)})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("not json", "is not a plan"),
        ("[1]", "is not a plan"),
        ('{"format": "patrickstar.plan", "version": 99}', "version 99"),
        (f'{{"format": "patrickstar.plan", "version": {VERSION}}}', "damaged"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, text, match):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        Plan.load(path)


def test_an_access_of_a_chunk_that_is_not_there_is_refused(planned, tmp_path):
    *_, path = planned
    fields = json.loads(path.read_text())
    fields["timeline"][0]["uses"].append([10_000, "PARAM", "READ"])
    other = tmp_path / "other.json"
    other.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="uses chunk 10000"):
        Plan.load(other)


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"nowhere\.json"):
        initialize_engine(MODELS["mlp"].build, 0, small_chunks(plan="nowhere.json"))


def test_there_is_no_plan_before_the_first_step():
    engine, _ = initialize_engine(MODELS["mlp"].build, 0, small_chunks())
    with engine, pytest.raises(StateError, match="no plan before the first step"):
        engine.plan()

import pytest

from patrickstar import _C
from patrickstar.activations.activation_rules import Saved
from patrickstar.planning.recomputation import SavedChoice
from patrickstar.session import recompute_choice
from tests.engine.test_recompute_choice import CASE
from tests.recomputing import choose_by_fixed_times, update_slower_beside_steps
from tests.training import assert_same, make_config, train


def choose_nothing(ladder, num_sent, seconds_of):
    return SavedChoice(0, {0: seconds_of(ladder, [0])[0]}, ladder)


CONFIG = make_config("bf16", default_chunk_size=2**14, delays={"link_gbps": 1e4})


def test_slow_updates_let_calls_save_less_so_that_more_states_rest_on_the_device(monkeypatch, caplog):
    choose_by_fixed_times(monkeypatch.setattr)
    always = train(CASE, CONFIG | {"activations": {"recompute": "always"}}, 10, checkpointing=False)
    update_slower_beside_steps(monkeypatch.setattr)
    saved, states = [], []

    def look(engine, _):
        saved.append(engine._session.checkpoint_calls.saved.count(Saved.NOTHING))
        states.append(engine.report()["num_device_state_chunks"])

    with caplog.at_level("INFO", "patrickstar"):
        auto = train(CASE, CONFIG | {"device_memory": "5MiB"}, 10, checkpointing=False, before_step=look)
    assert saved[1] < saved[-1]
    assert states[1] < states[-1]
    assert " s as before" in caplog.text
    assert_same(auto, always)


def test_updates_as_fast_as_measured_alone_change_nothing(monkeypatch, caplog):
    choose_by_fixed_times(monkeypatch.setattr)
    with caplog.at_level("INFO", "patrickstar"):
        run = train(CASE, CONFIG | {"device_memory": "8MiB"}, 10, checkpointing=False)
    assert run.report["num_replayed_accesses"] > 0
    assert "recomputing 0 of 4" in caplog.text
    assert " s as before" not in caplog.text


def test_a_step_that_recomputes_everything_is_planned_by_the_first_step(monkeypatch):
    choose_by_fixed_times(monkeypatch.setattr)
    monkeypatch.setattr(recompute_choice, "choose_saved", choose_nothing)
    found = []

    def look(engine, _):
        runtime = engine._session.runtime
        found.append((runtime.num_measurements, runtime.predicted_step()))

    train(CASE, CONFIG | {"device_memory": "5MiB"}, 4, checkpointing=False, before_step=look)
    assert [measurements for measurements, _ in found[:2]] == [0, 0]
    assert found[0][1] is None
    assert found[1][1]["seconds"] > 0


@pytest.mark.parametrize("clipping", [0.0, 1e-3])
def test_both_choices_know_whether_clipping_acts(monkeypatch, clipping):
    choose_by_fixed_times(monkeypatch.setattr)
    update_slower_beside_steps(monkeypatch.setattr)
    played, scales = recompute_choice.predicted_seconds, {}

    def predicted_seconds(engine, step, saved):
        scales.setdefault(step.rates.host_adam_params_per_second, set()).add(engine.scale)
        return played(engine, step, saved)

    monkeypatch.setattr(recompute_choice, "predicted_seconds", predicted_seconds)
    train(CASE, CONFIG | {"device_memory": "5MiB", "gradient_clipping": clipping}, 10, checkpointing=False)
    expected = {_C.ExpectedScale.BETWEEN if clipping else _C.ExpectedScale.EXACT}
    assert list(scales.values()) == [expected, expected]

import pytest
import torch

from patrickstar import _C, StateError
from patrickstar.runtime import initialize_engine
from tests.models import MODELS
from tests.training import assert_same, make_host_config, train

FORWARD = (_C.Tracking.TRAINING, _C.Attempt.FIRST)
CALLS = {
    "begin_forward": FORWARD,
    "begin_backward": (),
    "end_backward": (),
    "end_forward": (),
    "sum_of_squares": (),
    "apply_step": ([], 1.0, 1.0),
    "skip_step": (),
    "drop_step": (),
    "clear_gradients": (),
}


def refuse(runtime, names, match):
    state = runtime.step_state
    for name in names:
        with pytest.raises(StateError, match=match):
            getattr(runtime, name)(*CALLS[name])
        assert runtime.step_state == state


def test_calls_out_of_order_are_refused_and_change_nothing():
    case = MODELS["llama"]
    config = make_host_config("bf16", device_memory=2**20)
    expected = train(case, config, steps=3)
    ends = ["end_forward", "end_backward"]
    within = [name for name in CALLS if name not in ends]
    seen = set()

    def look(*_):
        runtime = engine._session.runtime
        if runtime.step_state not in seen:
            seen.add(runtime.step_state)
            forward = runtime.step_state != _C.StepState.BACKWARD
            other = "end_backward" if forward else "end_forward"
            where = "within a forward" if forward else "within a backward"
            refuse(runtime, [*within, other], f"{where}; call it when that is over")

    def between_steps(new_engine, _):
        nonlocal engine
        engine = new_engine
        refuse(engine._session.runtime, ends, "to end between steps; none is running")
        if not seen:
            engine.module.get_submodule("model.layers.0").register_forward_hook(look)
            engine.module.get_submodule("lm_head").weight.register_hook(look)

    engine = None
    assert_same(train(case, config, steps=3, before_step=between_steps), expected)
    assert seen == {_C.StepState.FORWARD, _C.StepState.BACKWARD}


def test_states_of_an_accumulating_step():
    states = _C.StepState
    case = MODELS["llama"]
    engine, optimizer = initialize_engine(case.build, 0, make_host_config("bf16"))
    with engine:
        runtime = engine._session.runtime
        batch = case.batch(torch.Generator().manual_seed(0))
        for micro_batch in range(2):
            loss = engine(**batch).loss
            assert runtime.step_state == (states.GRADIENTS if micro_batch else states.READY)
            engine.backward(loss)
            with torch.no_grad():
                engine(**batch)
            assert runtime.step_state == states.GRADIENTS
        optimizer.zero_grad()
        assert runtime.step_state == states.READY
        engine.backward(engine(**batch).loss)
        optimizer.step()
        assert runtime.step_state == states.READY

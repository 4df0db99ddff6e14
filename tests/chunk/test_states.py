import pytest
import torch

from patrickstar import _C, StateError
from patrickstar.runtime import initialize_engine
from tests.models import Mlp, token_batch
from tests.training import make_config


def test_states_over_a_step():
    engine, optimizer = initialize_engine(Mlp, 0, make_config("bf16", default_chunk_size=1024))
    with engine:
        runtime = engine._session.runtime
        ids = {name: param._patrickstar.id for name, param in engine.named_parameters()}

        def states():
            return {runtime.param_state(i) for i in ids.values()}

        assert states() == {"FREE"}
        seen = []
        engine.module.layers[1][0].register_forward_hook(lambda *_: None)
        engine.module.layers[1][0].register_forward_pre_hook(
            lambda *_: seen.append(runtime.param_state(ids["layers.1.0.weight"]))
        )
        loss = engine(**token_batch(torch.Generator().manual_seed(0)))["loss"]
        assert seen == ["COMPUTE"]
        assert states() == {"HOLD_AFTER_FWD"}
        engine.backward(loss)
        assert states() == {"HOLD_AFTER_BWD"}
        optimizer.step()
        assert states() == {"HOLD"}
        assert {runtime.chunk_state(chunk) for chunk in range(engine.report()["num_chunks"])} == {"HOLD"}
        with torch.no_grad():
            engine(**token_batch(torch.Generator().manual_seed(0)))
        assert states() == {"HOLD"}


@pytest.mark.parametrize(
    ("path", "legal"),
    [
        (["HOLD", "COMPUTE", "HOLD_AFTER_FWD", "COMPUTE", "HOLD_AFTER_BWD", "HOLD"], True),
        (["HOLD_AFTER_BWD", "FREE"], None),
        (["COMPUTE", "FREE"], False),
        (["HOLD", "HOLD_AFTER_FWD"], False),
        (["HOLD_AFTER_FWD", "RELEASED"], False),
    ],
)
def test_transitions(path, legal):
    if legal is False:
        with pytest.raises(StateError, match="cannot go from"):
            for before, after in zip(path, path[1:], strict=False):
                _C.check_transition(before, after)
    else:
        for before, after in zip(path, path[1:], strict=False):
            _C.check_transition(before, after)

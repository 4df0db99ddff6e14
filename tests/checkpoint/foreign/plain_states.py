"""Compares an engine with a plain run: values, states, counts and options, bit for bit; and what training makes."""

import torch

from tests.bits import assert_same_bits
from tests.checkpoint.foreign.plain_run import DECAYS, batches, engine_of


def check_same(engine, optimizer, model, plain):
    assert_same_bits(dict(engine.state_dict()), {name: value.detach() for name, value in model.state_dict().items()})
    own, expected = optimizer.state_dict(), plain.state_dict()
    assert own["state"].keys() == expected["state"].keys()
    for key, state in expected["state"].items():
        assert float(own["state"][key]["step"]) == float(state["step"])
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(own["state"][key][kind], state[kind]), (key, kind)
    assert [group["weight_decay"] for group in own["param_groups"]] == list(DECAYS)
    for group, other in zip(own["param_groups"], expected["param_groups"], strict=True):
        assert (group["lr"], tuple(group["betas"]), group["eps"]) == (other["lr"], other["betas"], other["eps"])


def check_resumes(folder, model, plain, after, options=None):
    """Loads the folder into a new engine, compares it, and trains.

    ``after``: losses and values of the plain run. ``options``: the engine's own, of its optimizer.
    """
    engine, optimizer = engine_of(options)
    with engine:
        path, client_state = engine.load_checkpoint(folder)
        check_same(engine, optimizer, model, plain)
        losses = []
        for tokens in batches(len(after[0]), 2):
            loss = engine(tokens)
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        torch.testing.assert_close(losses, after[0], rtol=1e-6, atol=1e-6)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, after[1][name], rtol=1e-6, atol=1e-6)
    return path, client_state


def check_refused(folder, *words, load=lambda engine, folder: engine.load_checkpoint(folder)):
    """Loading raises CheckpointError with ``words``, and leaves the engine as it was."""
    import pytest

    from patrickstar import CheckpointError

    engine, optimizer = engine_of()
    with engine:
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        with pytest.raises(CheckpointError) as caught:
            load(engine, folder)
        for word in words:
            assert word in str(caught.value)
        assert_same_bits(dict(engine.state_dict()), before)
        assert optimizer.state_dict()["state"] == {}
        engine.backward(engine(batches(1, 2)[0]))
        optimizer.step()
    return str(caught.value)

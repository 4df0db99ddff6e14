import pytest
import torch
from torch import nn

from patrickstar import StateError, torch_scope
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.training import make_config

LAYERS = 4


class Interrupted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(LAYERS))
        self.at: int | None = None

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if index == self.at and x.requires_grad:
                x.register_hook(self._interrupt)
        return x.float().square().mean()

    @staticmethod
    def _interrupt(_gradient):
        raise KeyboardInterrupt


def make(**options):
    config = make_config("bf16", default_chunk_size=1024, **options)
    config["optimizer"]["speculation"] = "commit"
    torch.manual_seed(0)
    return initialize_engine(Interrupted, 0, config)


def batch(step):
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(step))


def values(engine, optimizer):
    return {"model": engine.state_dict(), "optimizer": optimizer.state_dict()["state"]}


def train(engine, optimizer, steps):
    for step in steps:
        engine.backward(engine(batch(step)))
        optimizer.step()
        optimizer.zero_grad()


def same(one, other):
    try:
        assert_same_bits(one, other)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("on_device", [True, False])
def test_an_interrupted_backward_that_commits(on_device, tmp_path):
    engine, optimizer = make(**({} if on_device else {"device_memory": 40_000}))
    with engine:
        train(engine, optimizer, range(2))
        engine.save_checkpoint(tmp_path)
        before = values(engine, optimizer)
        train(engine, optimizer, range(2, 4))
        after = values(engine, optimizer)
        num_refused = 0
        for at in reversed(range(LAYERS)):
            engine.load_checkpoint(tmp_path)
            engine.module.at = at
            loss = engine(batch(2))
            with pytest.raises(KeyboardInterrupt) as raised:
                engine.backward(loss)
            engine.module.at = None
            if not same(values(engine, optimizer), before):
                num_refused += 1
                assert "updated in part" in "".join(getattr(raised.value, "__notes__", ["updated in part"]))
                for call in (
                    lambda: engine(batch(2)),
                    lambda: engine.module(batch(2)),
                    lambda loss=loss: engine.backward(loss),
                    optimizer.step,
                    optimizer.zero_grad,
                    lambda: engine.save_checkpoint(tmp_path / "again"),
                    lambda: engine.export_weights(tmp_path / "weights"),
                ):
                    with pytest.raises(StateError, match="a backward failed when .* chunks had been updated"):
                        call()
                engine.load_checkpoint(tmp_path)
            del loss
            train(engine, optimizer, range(2, 4))
            assert_same_bits(values(engine, optimizer), after)
        assert 0 < num_refused < LAYERS
        assert not (tmp_path / "again").exists() and not (tmp_path / "weights").exists()


def test_a_mixed_state_that_is_accepted():
    engine, optimizer = make()
    with engine:
        train(engine, optimizer, range(2))
        engine.module.at = 0
        with pytest.raises(KeyboardInterrupt):
            engine.backward(engine(batch(2)))
        engine.module.at = None
        with pytest.raises(StateError, match=r"call engine.accept_mixed_state\(\) to take parameters"):
            optimizer.zero_grad()
        engine.accept_mixed_state()
        train(engine, optimizer, range(3, 5))
        assert engine.report()["num_steps"] == 4


def test_a_step_whose_torch_optimizer_fails():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(24, 24)
            with torch_scope():
                self.head = nn.Linear(24, 4)

        def forward(self, x):
            return self.head(self.body(x)).square().mean()

    def fail(*_):
        raise MemoryError

    engine, optimizer = initialize_engine(Net, 0, make_config())
    with engine:
        engine.backward(engine(batch(0)))
        handle = engine._session.managed._optimizer.register_step_pre_hook(fail)
        try:
            with pytest.raises(MemoryError):
                optimizer.step()
        finally:
            handle.remove()
        for call in (optimizer.step, optimizer.zero_grad, lambda: engine(batch(0))):
            with pytest.raises(StateError, match=r"optimizer.step\(\) failed in the middle of an update"):
                call()
        engine.accept_mixed_state()
        engine.backward(engine(batch(0)))
        optimizer.step()

import ctypes
import functools

import pytest
import torch

from patrickstar import _C
from patrickstar.session import core_setup
from tests.engine.test_equality import WIDE
from tests.models import Case
from tests.training import Run, assert_same, least_device_memory, make_config, round_trips, taken_over, train

SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
STEPS = 6
NUM_CHUNKS_WITHOUT_MATRICES = 5  # biases between large matrices


def sign_of_mean(rows, columns, direction, momentum, master):
    del master
    direction, momentum = floats(direction, rows * columns), floats(momentum, rows * columns)
    direction.fill_(momentum.lerp_(direction, 0.1).mean().sign())


def floats(address: int, numel: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * numel).from_address(address), dtype=torch.float32)


def plainly(case: Case) -> Run:
    torch.manual_seed(0)
    module = case.build()
    matrices = {param: torch.zeros_like(param) for param in module.parameters() if param.dim() == 2}
    others = torch.optim.SGD([param for param in module.parameters() if param not in matrices], **SGD)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        module.zero_grad()
        loss = case.loss(module(**case.batch(generator)))
        loss.backward()
        losses.append(loss.item())
        others.step()
        with torch.no_grad():
            for param, momentum in matrices.items():
                sign = momentum.lerp_(param.grad, 0.1).mean().sign()
                param.mul_(1 - SGD["lr"] * SGD["weight_decay"]).add_(sign, alpha=-SGD["lr"])
    return Run(losses, {name: value.detach() for name, value in module.state_dict().items()}, {})


def config_of(precision="bf16", *, on_device=True, speculation="never", **more):
    config = make_config(precision, **more)
    params = {**SGD, "use_hybrid_adam": on_device}
    config["optimizer"] = {"type": "SGD", "params": params, "speculation": speculation}
    return config


@pytest.fixture(autouse=True)
def rule(monkeypatch):
    make = core_setup.make_engine_options

    def make_with_rule(*args):
        options = make(*args)
        options.set_matrix_rule(sign_of_mean)
        return options

    monkeypatch.setattr(core_setup, "make_engine_options", make_with_rule)


@functools.cache
def expected(precision="bf16", clipping=0.0) -> Run:
    return train(WIDE, config_of(precision, gradient_clipping=clipping), steps=STEPS)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch has no fma below AVX2")
def test_the_bits_of_plain_pytorch():
    plain = plainly(WIDE)
    run = expected("fp32")
    assert run.losses == plain.losses
    for key, value in run.state.items():
        assert torch.equal(value, plain.state[key]), key


def test_budgets_chunk_sizes_and_sides():
    roomy = expected()
    assert roomy.report["num_updates_device"] > 0
    for config in (
        config_of(device_memory=least_device_memory(WIDE, config_of())),
        config_of(on_device=False, default_chunk_size=4096),
        config_of(on_device=False, host_threads={"num_threads": 3}),
    ):
        run = train(WIDE, config, steps=STEPS)
        assert run.report["num_updates_host"] > 0
        assert_same(run, roomy)


def test_states_on_the_disk(tmp_path):
    config = config_of(on_device=False, disk_memory={"path": str(tmp_path)}, host_memory=4_000_000)
    run = train(WIDE, config, steps=STEPS)
    assert run.report["num_updates_disk"] > 0
    assert_same(run, expected())


def test_accumulation():
    runs = [train(WIDE, config_of(on_device=side), steps=3, accumulate=2) for side in (True, False)]
    assert_same(*runs)


@pytest.mark.parametrize("clipping", [0.0, 1e-3])
def test_never_ahead_of_the_norm(clipping):
    config = config_of(on_device=False, speculation="always", gradient_clipping=clipping, default_chunk_size=4096)
    run = train(WIDE, config, steps=STEPS)
    assert taken_over(run.report) > 0
    assert run.report["num_updates_host"] > 0
    assert_same(run, expected(clipping=clipping))


def test_commit_makes_no_round_trips():
    roomy = expected("fp32")

    def ask_for_round_trips(engine, _step):
        runtime = engine._session.runtime
        runtime.set_round_trips([True] * engine._session.layout.num_chunks)

    config = config_of("fp32", on_device=False, speculation="commit")
    run = train(WIDE, config, steps=STEPS, before_step=ask_for_round_trips)
    assert run.report["num_updates_host_committed"] > 0
    assert round_trips(run.report) == (STEPS - 1) * NUM_CHUNKS_WITHOUT_MATRICES
    assert_same(run, roomy)


def test_split_masters_are_refused():
    with pytest.raises(ValueError, match=r"weight is updated as a whole matrix, which needs a float32 master"):
        train(WIDE, config_of(speculation="commit"), steps=1)


def test_a_matrix_that_ranks_share_is_refused():
    numel, shape = 16384, [128, 128]
    options = _C.EngineOptions()
    options.param_shapes = [shape]
    options.set_matrix_rule(sign_of_mean)
    for rank in (0, 1):
        layout = _C.Layout.pack([numel], [_C.DType.FLOAT32], [True], numel, num_ranks=2, rank=rank)
        with pytest.raises(ValueError, match=r"wide.weight .* its 16384 elements lie on 2 ranks, .* one rank"):
            _C.Runtime(layout, ["wide.weight"], [[0]], options)


def test_an_error_of_the_rule_is_the_users(monkeypatch):
    def fail(*_):
        raise RuntimeError("no direction")

    monkeypatch.setattr(f"{__name__}.sign_of_mean", fail)
    with pytest.raises(RuntimeError, match="no direction"):
        train(WIDE, config_of(on_device=False), steps=2)

import pytest
import torch

from patrickstar import _C
from patrickstar.config import OptimizerType
from patrickstar.engine.optimizer_takeover import groups_of, move_state
from patrickstar.optimizer.lion import Lion
from patrickstar.runtime import initialize_engine
from tests.models import MODELS, token_batch


def grouped(optimizer_class, module, **options):
    decayed = [param for param in module.parameters() if param.ndim > 1]
    rest = [param for param in module.parameters() if param.ndim <= 1]
    return optimizer_class(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 2e-3}], **{"lr": 1e-3, **options}
    )


ADAM = {"betas": (0.8, 0.99), "eps": 1e-6}


@pytest.mark.parametrize(
    ("optimizer_class", "options", "expected"),
    [
        (torch.optim.AdamW, ADAM, OptimizerType.ADAMW),
        (torch.optim.Adam, {**ADAM, "foreach": True}, OptimizerType.ADAM),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "foreach": True}, OptimizerType.SGD),
        (torch.optim.SGD, {}, OptimizerType.SGD),
        (Lion, {"betas": (0.8, 0.99)}, OptimizerType.LION),
    ],
)
def test_a_run_goes_on(optimizer_class, options, expected):
    case = MODELS["mlp"]
    torch.manual_seed(0)
    plain, module = case.build(), case.build()
    module.load_state_dict(plain.state_dict())
    generator = torch.Generator().manual_seed(1)
    batches = [token_batch(generator) for _ in range(5)]
    plain_optimizer = grouped(optimizer_class, plain, **options)
    plain_scheduler = torch.optim.lr_scheduler.LinearLR(plain_optimizer, 0.5, 1.0, 5)
    optimizer = grouped(optimizer_class, module, **options)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 5)

    def step(model, optim, schedule, batch, backward):
        optim.zero_grad()
        backward(case.loss(model(**batch)))
        optim.step()
        schedule.step()

    for batch in batches:
        step(plain, plain_optimizer, plain_scheduler, batch, torch.Tensor.backward)
    for batch in batches[:2]:
        step(module, optimizer, scheduler, batch, torch.Tensor.backward)
    hooked = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append("before"))
    last = optimizer.register_step_post_hook(lambda *_: hooked.append("after"))
    taken = groups_of(optimizer)
    assert taken.type is expected
    assert [group["lr"] for group in taken.groups] == [group["lr"] for group in optimizer.param_groups]
    assert taken.groups[0]["weight_decay"] == 0.1
    for key, value in options.items():
        assert key == "foreach" or taken.defaults[key] == taken.groups[0][key] == value
    config = {"optimizer": {"type": taken.type.value, "params": taken.defaults}}
    engine, hybrid = initialize_engine(lambda: module, 0, config, model_parameters=lambda _: taken.groups)
    with engine:
        engine.train()
        move_state(optimizer, hybrid)
        assert not optimizer.state
        for batch in batches[2:]:
            step(module, hybrid, scheduler, batch, engine.backward)
        assert hooked == ["before", "after"] * 3
        last.remove()
        hybrid.step()
        assert hooked[6:] == ["before"]
        assert "foreach" not in hybrid.param_groups[0]
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
        engine.backward(case.loss(module(**batches[0])))
        with pytest.raises(
            RuntimeError, match="updated by the optimizer that came with the engine"
        ):  # never silently nothing
            optimizer.step()


class Custom(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adagrad(p), r"torch\.optim\.adagrad\.Adagrad; .*torch\.optim\.AdamW do, .*: give one"),
        (lambda p: torch.optim.SGD(p, maximize=True), "maximize=True, .* negate the loss"),
        (lambda p: torch.optim.SGD(p, dampening=2.0), "group 0 of the optimizer.dampening is 2.0"),
        (lambda p: torch.optim.Adafactor(p), r'give one of these \(.*use AdamW with optimizer.states "8bit"\)'),
        (lambda p: Custom(p), r"Custom; PatrickStar updates as .*\(use AdamW\)"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "group 0 .* amsgrad=True, which keeps"),
        (lambda p: torch.optim.Adam(p, maximize=True), "maximize=True, .* negate the loss"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable=True"),
    ],
)
def test_refused(make, message):
    with _C.HostAllocations():
        weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=message):
        groups_of(make([weight]))

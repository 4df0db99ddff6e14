import threading

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import StateError
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.several_engines import RECIPES, Discriminator, Generator, config_of, run, run_plain
from tests.training import make_config


@pytest.mark.parametrize("name", RECIPES)
def test_against_plain_pytorch(name):
    ours, plain = run(name, config_of("fp32")), run_plain(name)
    torch.testing.assert_close(ours.losses, plain.losses, rtol=1e-5, atol=1e-6)
    for role, state in plain.states.items():
        for key, value in state.items():
            torch.testing.assert_close(ours.states[role][key], value, rtol=1e-4, atol=1e-5, msg=f"{role}.{key}")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_shared_budget(name, precision):
    roomy = run(name, config_of(precision))
    budget = 2 * max(report["device_peak_bytes"] for report in roomy.reports.values()) // 3
    scarce = run(name, config_of(precision, device_memory=budget))
    assert [loss.hex() for loss in scarce.losses] == [loss.hex() for loss in roomy.losses]
    for role, state in roomy.states.items():
        assert_same_bits(scarce.states[role], state, role)
    moved = {role: report["num_evictions"] for role, report in scarce.reports.items()}
    print(f"{name}, {precision}: {budget} bytes for all; arrays that made room: {moved}")
    assert sum(moved.values()) > 0
    assert all(report["device_peak_bytes"] <= budget for report in scarce.reports.values())


def test_operations_on_parameters_of_several_engines():
    engine, optimizer = initialize_engine(Generator, 0, make_config("bf16", device_memory="1MB"))
    other, _ = initialize_engine(Generator, 0, make_config("bf16"))
    with engine, other:
        before = {name: value.clone() for name, value in other.state_dict().items()}
        engine.backward(engine(torch.ones(4, 8)).float().square().mean())
        optimizer.step()
        with torch.no_grad():
            for average, param in zip(other.module.parameters(), engine.module.parameters(), strict=True):
                average.mul_(0.5).add_(param, alpha=0.5)
        now, state = other.state_dict(), engine.state_dict()
        for name, value in before.items():
            expected = value * 0.5
            expected.add_(state[name], alpha=0.5)
            torch.testing.assert_close(now[name], expected, rtol=1e-6, atol=1e-7)
        engine.zero_grad()
        pairs = zip(engine.module.parameters(), other.module.parameters(), strict=True)
        loss = engine(torch.ones(4, 8)).float().mean() * 0
        loss = loss + sum((mine - theirs.detach()).float().square().sum() for mine, theirs in pairs)
        engine.backward(loss)
        assert engine.grad_norm() > 0


def test_parameters_that_stay_with_pytorch_alone():
    def build_head():
        torch.manual_seed(1)
        with patrickstar.torch_scope():
            return nn.Linear(8, 4)

    head = build_head()
    body, optimizer = initialize_engine(lambda: nn.Linear(8, 8), 0, make_config())
    kept, kept_optimizer = initialize_engine(build_head, 0, make_config())
    with body, kept:
        x = torch.randn(2, 8)
        body.backward(kept(body(x)).square().mean())
        head(body(x).detach()).square().mean().backward()
        torch.testing.assert_close(kept.module.weight.grad, head.weight.grad)
        optimizer.step()
        kept_optimizer.step()
        assert not torch.equal(kept.state_dict()["weight"], head.weight)


def test_budgets_are_one():
    first, _ = initialize_engine(Generator, 0, make_config("bf16", device_memory="1MB", host_memory="64MB"))
    with first:
        second, _ = initialize_engine(Discriminator, 0, make_config("bf16"))
        with second:
            budgets = [engine.report() for engine in (first, second)]
            assert budgets[0]["device_budget_bytes"] == budgets[1]["device_budget_bytes"] == 10**6
            assert budgets[0]["host_budget_bytes"] == budgets[1]["host_budget_bytes"] == 64 * 10**6
        for key, value in {"device_memory": "2MB", "host_memory": "32MB"}.items():
            with pytest.raises(ValueError, match=f"{key} is .* all engines of a process share one budget"):
                initialize_engine(Discriminator, 0, make_config("bf16", **{key: value}))
        big = lambda: nn.Sequential(*(nn.Linear(100, 100) for _ in range(450)))  # noqa: E731
        with pytest.raises(patrickstar.MemoryBudgetError, match="other engines of this process have [1-9]"):
            initialize_engine(big, 0, make_config("fp32"))
        first.backward(first(torch.ones(4, 8)).float().mean())
    third, _ = initialize_engine(Discriminator, 0, make_config("bf16", device_memory="2MB"))
    third.close()


def test_a_parameter_belongs_to_one_engine():
    module = Generator()
    engine, _ = initialize_engine(lambda: module, 0, make_config("bf16"))
    with engine:
        with pytest.raises(ValueError, match=r"0.weight belongs to an engine .*patrickstar.close_open_engine\(\)"):
            initialize_engine(lambda: nn.Sequential(*module), 0, make_config("bf16"))
        engine.backward(engine(torch.ones(4, 8)).float().mean())


def test_engines_close_in_any_order():
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        engines = [initialize_engine(Generator, 0, make_config("bf16", device_memory="1MB"))[0] for _ in range(3)]
        for closing in order:
            for engine in engines:
                if engine._session.closed:
                    continue
                engine.backward(engine(torch.ones(4, 8)).float().mean())
                engine.zero_grad()
            engines[closing].close()


def test_a_joint_backward_that_fails():
    maker, maker_optimizer = initialize_engine(Generator, 0, make_config("fp32"))
    judge, _ = initialize_engine(Discriminator, 0, make_config("fp32"))
    with maker, judge:
        loss = judge(maker(torch.ones(4, 8))).mean()
        judge.backward(loss, retain_graph=True)
        norms = [maker.grad_norm(), judge.grad_norm()]
        maker.zero_grad()
        judge.zero_grad()
        out = maker(torch.ones(4, 8))

        def fail(gradient):
            raise KeyError("in backward")

        out.register_hook(fail)
        with pytest.raises(KeyError, match="in backward"):
            judge.backward(judge(out).mean())
        judge.backward(judge(maker(torch.ones(4, 8))).mean())
        assert [maker.grad_norm(), judge.grad_norm()] == norms
        maker_optimizer.step()


def test_loss_scales_of_a_joint_backward():
    """Gradients of one loss have one scale: that of the engine whose backward ran."""
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8}
    maker, maker_optimizer = initialize_engine(Generator, 0, {**make_config("fp32"), "fp16": fp16})
    judge, judge_optimizer = initialize_engine(
        Discriminator, 0, {**make_config("fp32"), "fp16": {**fp16, "initial_scale_power": 6}}
    )
    with maker, judge:
        judge.backward(judge(maker(torch.ones(4, 8))).float().mean())
        norms = [maker.grad_norm(), judge.grad_norm()]
        with pytest.raises(StateError, match="scaled by 64 so far and would be by 256"):
            maker.backward(judge(maker(torch.ones(4, 8))).float().mean())
        maker.zero_grad()
        judge.zero_grad()
        maker.backward(judge(maker(torch.ones(4, 8))).float().mean())
        assert [maker.grad_norm(), judge.grad_norm()] == pytest.approx(norms, rel=1e-3)
        maker_optimizer.step()
        judge_optimizer.step()
        assert maker.report()["num_steps"] == judge.report()["num_steps"] == 1


class Towers(nn.Module):
    def __init__(self, within=lambda: None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))
        self.within = within

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index == 6:
                self.within()
            x = layer(x).tanh()
        return x.square().mean()


def train_towers(engine, optimizer, steps=6):
    losses = []
    for step in range(steps):
        loss = engine(torch.randn(4, 16, generator=torch.Generator().manual_seed(step)))
        engine.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def towers(within=lambda: None, **options):
    torch.manual_seed(0)
    return initialize_engine(lambda: Towers(within), 0, make_config(default_chunk_size=1024, **options))


def test_a_thread_for_each_engine():
    engine, optimizer = towers()
    with engine:
        expected = train_towers(engine, optimizer)
        state = engine.state_dict()
    turns = threading.Barrier(2)
    pairs = [towers(lambda: turns.wait(20), device_memory=60_000) for _ in range(2)]
    found, failures = [None, None], []

    def run(index):
        try:
            found[index] = train_towers(*pairs[index])
        except BaseException as error:
            failures.append(error)
            turns.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for (engine, _), losses in zip(pairs, found, strict=True):
        assert losses == expected
        assert_same_bits(engine.state_dict(), state)
        engine.close()


def on_a_thread(call):
    result = []

    def run():
        try:
            result.append(call())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def test_threads_that_take_turns_with_one_engine():
    engine, optimizer = towers()
    other, other_optimizer = towers()
    with engine, other:
        expected = train_towers(engine, optimizer)
        losses = []
        for step in range(len(expected)):
            batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            loss = on_a_thread(lambda batch=batch: other(batch))
            on_a_thread(lambda loss=loss: other.backward(loss))
            on_a_thread(other_optimizer.step)
            losses.append(loss.item())
        assert losses == expected
        assert_same_bits(other.state_dict(), engine.state_dict())


def test_two_threads_in_one_engine_are_refused():
    messages = []

    def use_at_once():
        for call in (lambda: engine(x), lambda: engine.module(x), optimizer.zero_grad, engine.state_dict, engine.close):
            with pytest.raises(StateError, match="on thread 'other', while this engine's forward of step 1") as raised:
                on_a_thread(call)
            messages.append(str(raised.value))

    x = torch.ones(4, 16)
    engine, optimizer = towers(use_at_once)
    with engine:
        engine.backward(engine(x))
        optimizer.step()
        assert len(messages) == 5
        assert all("put a lock around its calls" in message for message in messages)


def test_a_loss_of_two_threads_is_refused():
    maker, maker_optimizer = initialize_engine(Generator, 0, make_config("fp32"))
    judge, _ = initialize_engine(Discriminator, 0, make_config("fp32"))
    with maker, judge:
        made = on_a_thread(lambda: maker(torch.ones(4, 8)))
        with pytest.raises(StateError, match="outside of its engine's backward.* on one thread"):
            judge.backward(judge(made).mean())
        maker.zero_grad()
        judge.zero_grad()
        maker.backward(maker(torch.ones(4, 8)).mean())
        maker_optimizer.step()

import functools
import logging
import re

import pytest
import torch

from patrickstar import sizes
from patrickstar.engine.optimizer_takeover import groups_of
from patrickstar.monitor import show_log
from patrickstar.runtime import initialize_engine
from tests.models import BATCH, LENGTH, Case, Mlp, token_batch
from tests.training import Run, assert_same, make_config

CASE = Case(functools.partial(Mlp, width=64), token_batch)
ACCUMULATE = 2
CASE_OPTIMIZER = "AdamW, lr 0.001, weight decay 0.01"


def train(tmp_path, **config):
    torch.manual_seed(0)
    options = make_config("bf16", default_chunk_size=8192, device_memory="600KB", **config)
    engine, optimizer = initialize_engine(CASE.build, 0, options)
    generator, losses = torch.Generator().manual_seed(1), []
    with engine:
        for step in range(1, 6):
            engine.backward(CASE.loss(engine(**CASE.batch(generator))))
            optimizer.zero_grad()
            for _ in range(ACCUMULATE):
                loss = CASE.loss(engine(**CASE.batch(generator))) / ACCUMULATE
                losses.append(loss.item())
                engine.backward(loss)
            with torch.no_grad():
                engine(**CASE.batch(generator))
            optimizer.step()
            if step == 3:
                engine.save_checkpoint(tmp_path)
                engine.load_checkpoint(tmp_path)
        return Run(losses, engine.state_dict(), engine.report())


def test_a_plain_loop(tmp_path, caplog):
    silent = train(tmp_path / "silent", steps_per_print=0)
    assert caplog.messages == []
    caplog.set_level(logging.INFO, "patrickstar")
    run = train(tmp_path / "seen", steps_per_print=2)
    assert_same(run, silent)
    print(*caplog.messages, sep="\n")
    usual = [message for message in caplog.messages if "ran short" not in message]
    assert len(usual) + 1 == len(caplog.messages)  # each step does, and the first one says so
    start, plan, second, saved, resumed, fourth = usual
    report = run.report
    assert start == (
        f"{sizes.show_count(report['num_parameters'])} parameters in bfloat16 on a device simulated in host memory; "
        f"device budget 586 KiB, host budget {sizes.show_size(report['host_budget_bytes'])}; "
        f"{report['num_chunks']} chunks of up to {sizes.show_count(report['chunk_numel'])} elements, "
        "or of one parameter, up to 8.19k, optimizer states all on the host; "
        f"{CASE_OPTIMIZER}"
    )
    assert re.fullmatch(r"plan: optimizer states .+; a step moves .+ up and .+ down", plan)
    for line, step in ((second, 2), (fourth, 4)):
        loss = sum(run.losses[ACCUMULATE * (step - 1) : ACCUMULATE * step])
        assert line.startswith(f"step {step}  loss {loss:.4f}  grad norm ")
        seconds, rate = re.search(r"  (\S+ \w+)/step  (\S+) tokens/s", line).groups()
        tokens = (ACCUMULATE + 1) * BATCH * LENGTH  # all forwards in training mode
        shown = float(rate.removesuffix("k")) * (1000 if rate.endswith("k") else 1)
        number, unit = seconds.split()
        assert shown == pytest.approx(tokens / (float(number) * {"s": 1, "ms": 1e-3}[unit]), rel=0.02)
    folder = re.escape(str(tmp_path / "seen" / "global_step3"))
    assert re.fullmatch(rf"saved to {folder} \(\d.* KiB in .+ m?s\)", saved)
    assert re.fullmatch(rf"resumed from {folder}, step 3", resumed)


def test_a_parameter_that_is_larger_than_a_chunk(caplog):
    caplog.set_level(logging.INFO, "patrickstar")
    engine, _ = initialize_engine(functools.partial(Mlp, width=64), 0, make_config("bf16", default_chunk_size=2048))
    engine.close()
    assert "chunks of up to 2.05k elements, or of one parameter, up to 8.19k, optimizer states" in caplog.messages[0]


@pytest.mark.parametrize(
    ("optimizer", "groups", "shown"),
    [
        ({}, None, "Adam, lr 0.001, weight decay 0"),
        ({"type": "AdamW"}, None, "AdamW, lr 0.001, weight decay 0 (the default; torch.optim.AdamW's is 0.01)"),
        ({"type": "AdamW", "params": {"weight_decay": 0}}, None, "AdamW, lr 0.001, weight decay 0"),
        (
            {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
            [{"params": "*bias", "weight_decay": 0.0}, {"params": "*", "lr": 1e-3}],
            "AdamW, lr 0.0003 to 0.001, weight decay 0 to 0.1",
        ),
        ({"type": "SGD", "params": {"lr": 0.1}}, None, "SGD, lr 0.1, weight decay 0"),
    ],
)
def test_the_start_line_names_the_optimizer(optimizer, groups, shown, caplog):
    caplog.set_level(logging.INFO, "patrickstar")
    engine, _ = initialize_engine(lambda: torch.nn.Linear(8, 8), 0, {"optimizer": optimizer}, groups)
    engine.close()
    assert caplog.messages[0].endswith(f"; {shown}")


def test_a_scheduled_rate_is_named_before_its_warmup(caplog):
    caplog.set_level(logging.INFO, "patrickstar")
    model = torch.nn.Linear(8, 8)
    theirs = torch.optim.AdamW(model.parameters(), lr=3e-4)
    torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: step / 10)
    taken = groups_of(theirs)
    engine, _ = initialize_engine(model, 0, {"optimizer": {"type": "AdamW"}}, lambda _: taken.groups)
    engine.close()
    assert caplog.messages[0].endswith("; AdamW, lr 0.0003, weight decay 0.01")


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_run_without_backward_is_warned_once(caplog):
    engine, optimizer = initialize_engine(lambda: torch.nn.Linear(2, 2), 0, {"steps_per_print": 0})
    inputs = torch.ones(1, 2)
    with engine:
        for _ in range(30):
            for _ in range(3):
                loss = engine(inputs).sum()
            engine.backward(loss)
            optimizer.step()
            optimizer.step()  # without gradients, but not in a row
        with torch.no_grad():
            for _ in range(101):
                engine(inputs)
        assert warnings_of(caplog) == []
        for _ in range(250):
            engine(inputs)
            optimizer.step()
        engine.backward(engine(inputs).sum())
        for _ in range(150):
            engine(inputs)
    idle, forwards = warnings_of(caplog)
    assert "called 10 times in a row without gradients" in idle and "model.backward(loss) before each step" in idle
    assert forwards.startswith("100 forwards in a row had no backward") and "torch.no_grad()" in forwards


@pytest.mark.parametrize(
    ("config", "what", "remedy"),
    [
        ({"fp16": {"initial_scale_power": 14}}, "at loss scales down to 1:", "Lower fp16.initial_scale_power"),
        ({"fp16": {"loss_scale": 8}}, "at loss scales down to 8:", "Set fp16.loss_scale to 0"),
        ({}, "not finite: nothing is trained", "with a lower learning rate"),
    ],
)
def test_a_run_of_skipped_steps_is_warned_once(config, what, remedy, caplog):
    engine, optimizer = initialize_engine(lambda: torch.nn.Linear(2, 2), 0, {"steps_per_print": 0, **config})
    with engine:
        for count in range(45):
            factor = 0.0 if count == 5 else float("nan")
            engine.backward((engine(torch.ones(1, 2)) * factor).sum())
            optimizer.step()
            found = [text for text in warnings_of(caplog) if "steps in a row were skipped" in text]
            assert len(found) == (count >= 25)
    assert what in found[0] and remedy in found[0]


def test_it_says_nothing_below_the_level(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "patrickstar")
    train(tmp_path, steps_per_print=1)
    assert caplog.messages == []


@pytest.fixture
def plain_logging(monkeypatch):
    logger = logging.getLogger("patrickstar")
    level = logger.level

    def begin():
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setattr(logger, "handlers", [])
        logger.setLevel(logging.NOTSET)  # examples that were imported before have chosen another one
        return logger

    yield begin
    logger.setLevel(level)


def test_where_the_log_goes(plain_logging, capsys, monkeypatch):
    logger = plain_logging()
    show_log()
    show_log()
    logger.info("one")
    assert capsys.readouterr().err == "patrickstar: one\n"
    monkeypatch.setenv("RANK", "1")
    logger.info("of another rank")
    logger.warning("two")
    assert capsys.readouterr().err == "patrickstar: two\n"
    logging.getLogger().addHandler(logging.NullHandler())  # the user sets up logging later
    logger.warning("three")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("chosen", ["level", "handler", "handler of the root"])
def test_what_the_user_has_set_up_stays(chosen, plain_logging, capsys):
    logger = plain_logging()
    if chosen == "level":
        logger.setLevel(logging.WARNING)
    else:
        (logging.getLogger() if chosen == "handler of the root" else logger).addHandler(logging.NullHandler())
    before = logger.level
    show_log()
    logger.info("unseen")
    assert logger.level == before
    assert capsys.readouterr().err == ""


def test_amounts():
    assert [sizes.show_count(count) for count in (0, 12, 999, 999.9, 3210, 1.24e9)] == [
        "0", "12", "999", "1k", "3.21k", "1.24B"
    ]  # fmt: skip
    assert [sizes.show_seconds(time) for time in (0.0, 8e-5, 0.0053, 1.2449, 320.0)] == [
        "0 us", "80 us", "5.3 ms", "1.24 s", "320 s"
    ]  # fmt: skip

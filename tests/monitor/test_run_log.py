import functools
import logging
import re

import pytest
import torch

from patrickstar import sizes
from patrickstar.monitor import show_log
from patrickstar.runtime import initialize_engine
from tests.models import BATCH, LENGTH, Case, Mlp, token_batch
from tests.training import Run, assert_same, make_config

CASE = Case(functools.partial(Mlp, width=64), token_batch)
ACCUMULATE = 2


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
        "or of one parameter, up to 8.19k, optimizer states all on the host"
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

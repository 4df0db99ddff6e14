import csv
import dataclasses
import functools
import itertools
import logging
import re
import sys
import types
from collections import UserDict
from pathlib import Path

import pytest
import torch

from patrickstar import _C
from patrickstar.monitor import (
    CsvMonitorConfig,
    FlopsProfilerConfig,
    MonitorOptions,
    Phase,
    RunFacts,
    Stalls,
    StallSampler,
    StepMonitor,
    TensorBoardConfig,
    WandbConfig,
    open_sinks,
)
from patrickstar.monitor.batch import BatchSize, size_of_batch
from patrickstar.monitor.figures import METRICS, StepFigures
from patrickstar.runtime import initialize_engine
from patrickstar.sizes import show_seconds, show_size
from tests.models import BATCH, LENGTH, Case, Mlp, token_batch
from tests.training import Run, assert_same, make_config, train

GIB = 2**30
ACCUMULATE = 2
WIDTH = 64
CASE = Case(functools.partial(Mlp, width=WIDTH), token_batch)


def ticks():
    """A clock that advances 1/8 s whenever it is read."""
    return functools.partial(next, itertools.count(0.0, 0.125))


@dataclasses.dataclass
class Watched:
    run: Run
    num_parameters: int
    reports: list[dict]
    stalls: list[dict]
    """The sampler's readings."""
    user_trace: dict | None
    """The seventh step's trace, requested by another reader."""


def facts_of(module, **options):
    num_parameters = sum(param.numel() for param in module.parameters())
    return RunFacts(num_parameters=num_parameters, num_trainable=num_parameters, **options)


def watch(case, config, options, steps, clock=None):
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(case.build, 0, config)
    generator = torch.Generator().manual_seed(1)
    losses, reports, stalls = [], [], []
    with engine:
        engine.train()
        runtime = engine._session.runtime

        def take():
            taken = runtime.take_stalls()
            stalls.extend([taken] if taken is not None else [])
            return taken

        sampler = StallSampler(runtime.start_stall_trace, take)
        facts = facts_of(engine.module)
        monitor = StepMonitor(options, facts, engine.report, sampler, **({"clock": clock} if clock else {}))
        for step in range(1, steps + 1):
            if step == 7:
                runtime.start_trace()
            optimizer.zero_grad()
            for _ in range(ACCUMULATE):
                batch = case.batch(generator)
                with monitor.phase(Phase.FORWARD):
                    loss = case.loss(engine(**batch))
                monitor.add_micro_batch(batch, loss)
                with monitor.phase(Phase.BACKWARD):
                    engine.backward(loss / ACCUMULATE)
                losses.append(loss.item())
                del loss
            with monitor.phase(Phase.STEP):
                optimizer.step()
            monitor.end_step(lr=optimizer.param_groups[0]["lr"])
            reports.append(engine.report())
        run = Run(losses, engine.state_dict(), engine.report())
        user_trace = runtime.take_trace()
    monitor.close()
    return Watched(run, facts.num_parameters, reports, stalls, user_trace)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "patrickstar")
    return lambda: [message for message in caplog.messages if message.startswith("step ")]


def test_a_run_that_is_watched(tmp_path, lines):
    config = make_config(
        "fp16", default_chunk_size=8192, device_memory="600KB", gradient_clipping=0.1, steps_per_print=0
    )
    expected = train(CASE, config, steps=8, accumulate=ACCUMULATE)
    options = MonitorOptions(
        steps_per_print=4,
        wall_clock_breakdown=True,
        csv_monitor=CsvMonitorConfig(enabled=True, output_path=str(tmp_path), job_name="job"),
    )
    watched = watch(CASE, config, options, steps=8, clock=ticks())
    assert_same(watched.run, expected)
    assert watched.run.report["uploaded_bytes"] > 0

    said = lines()
    assert [line.split("  ")[0] for line in said] == ["step 4", "step 8"]
    assert len(watched.stalls) == 2
    trace, stalled = watched.user_trace, {}
    for span in trace["spans"]:
        if span["track"] == _C.Track.STALL:
            stalled[span["cause"]] = stalled.get(span["cause"], 0.0) + span["seconds"]
    assert trace["seconds"] == watched.stalls[1]["seconds"]  # the same step; each reader has its own trace
    assert stalled == pytest.approx(watched.stalls[1]["stalled_seconds"])
    for line, step, taken in zip(said, (4, 8), watched.stalls, strict=True):
        print(line)
        report = watched.reports[step - 1]
        loss = sum(watched.run.losses[ACCUMULATE * (step - 1) : ACCUMULATE * step]) / ACCUMULATE
        share = 100 * sum(taken["stalled_seconds"].values()) / taken["seconds"]
        for part in (
            f"loss {loss:.4f}",
            f"grad norm {report['grad_norm']:.3g}",
            "lr 1.00e-3",
            f"loss scale {report['loss_scale']:g}",
            f"device {show_size(report['device_peak_bytes'])}",
            f"host {show_size(report['host_peak_bytes'])}",
            f"stalled {share:.0f} %",
            # Each phase reads the clock twice, 1/8 s apart: two forwards and backwards in a step.
            "forward 250.0 ms  backward 250.0 ms  step 125.0 ms",
        ):
            assert f"  {part}" in line
    rows = list(csv.DictReader((tmp_path / "job" / "metrics.csv").open()))
    assert [(row["step"], row["samples"]) for row in rows] == [
        (str(n), str(n * ACCUMULATE * BATCH)) for n in range(1, 9)
    ]
    for number, row in enumerate(rows):
        losses = watched.run.losses[ACCUMULATE * number : ACCUMULATE * (number + 1)]
        assert float(row["Train/Samples/train_loss"]) == sum(losses) / ACCUMULATE
        assert float(row["patrickstar/grad_norm"]) == watched.reports[number]["grad_norm"]
        assert float(row["Train/Samples/loss_scale"]) == watched.reports[number]["loss_scale"]
        for name, key in (("device_gib", "device_peak_bytes"), ("host_gib", "host_peak_bytes")):
            expected = str(watched.reports[number][key] / GIB) if number in (3, 7) else ""
            assert row[f"patrickstar/{name}"] == expected
        assert (row["patrickstar/tokens_per_second"] != "") == (number in (3, 7))
    seconds = 0.125 * (4 * 11 + 1)  # a step reads the clock as it begins and ten times for phases; a line once
    rate = 4 * ACCUMULATE * BATCH * LENGTH / seconds
    assert float(rows[7]["patrickstar/tokens_per_second"]) == pytest.approx(rate, rel=1e-12)
    assert float(rows[7]["patrickstar/model_tflops"]) == pytest.approx(6 * watched.num_parameters * rate / 1e12)


def test_no_number_is_read_between_lines(lines):
    report = {"grad_norm": 1.0, "loss_scale": 1.0, "num_skipped_steps": 0, "device_peak_bytes": 0, "host_peak_bytes": 0}
    monitor = StepMonitor(
        MonitorOptions(steps_per_print=3), RunFacts(num_parameters=1, num_trainable=1), lambda: report
    )
    loss = torch.zeros((), device="meta", requires_grad=True)
    for step in range(1, 4):
        for _ in range(2):
            monitor.add_micro_batch({"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, loss)
        if step < 3:
            monitor.end_step(lr=0.1)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        monitor.end_step(lr=0.1)


def test_a_silent_logger(lines, caplog):
    report = {"grad_norm": 1.0, "loss_scale": 1.0, "num_skipped_steps": 0, "device_peak_bytes": 0, "host_peak_bytes": 0}
    facts = RunFacts(num_parameters=1, num_trainable=1)
    monitor = StepMonitor(MonitorOptions(steps_per_print=2), facts, lambda: report, clock=ticks())
    for step in range(1, 9):
        caplog.set_level(logging.WARNING if step < 7 else logging.INFO, "patrickstar")
        unreadable = torch.zeros((), device="meta")
        monitor.add_micro_batch(torch.zeros(4, 3), unreadable if step < 7 else 5.0)
        monitor.end_step(lr=0.1)
    (line,) = lines()
    assert line.startswith("step 8  loss 5.0000  ")
    assert f"  {show_seconds(0.125)}/step  " in line


def test_other_ranks_and_idle_monitors_do_nothing(tmp_path, lines):
    def report():
        raise AssertionError("nobody asked")

    asked = MonitorOptions(
        steps_per_print=1,
        csv_monitor=CsvMonitorConfig(enabled=True, output_path=str(tmp_path)),
        flops_profiler=FlopsProfilerConfig(enabled=True, profile_step=0),
    )
    facts = RunFacts(num_parameters=1, num_trainable=1, rank=1, num_ranks=2)
    idle = RunFacts(num_parameters=1, num_trainable=1)
    for monitor in (StepMonitor(asked, facts, report), StepMonitor(MonitorOptions(), idle, report)):
        assert not monitor.is_active
        with monitor.phase(Phase.FORWARD):
            loss = torch.zeros((), device="meta")
        monitor.add_micro_batch([loss], loss)
        monitor.end_step(lr=1.0)
        monitor.close()
    assert lines() == []
    assert list(tmp_path.iterdir()) == []


def test_rates_count_all_ranks_and_a_resumed_run_counts_on(tmp_path, lines):
    report = {"grad_norm": 1.5, "loss_scale": 2.0, "num_skipped_steps": 0, "device_peak_bytes": 3 * GIB}
    report["host_peak_bytes"] = 5 * GIB
    asked = {"csv_monitor": CsvMonitorConfig(enabled=True, output_path=str(tmp_path))}
    facts = RunFacts(num_parameters=10**9, num_trainable=10**6, num_ranks=2, peak_tflops=64.0)
    state = {}
    for num_steps in (12, 3):
        monitor = StepMonitor(MonitorOptions(**asked), facts, lambda: report, clock=ticks())
        if state:
            monitor.load_state_dict(state)
        for step in range(num_steps):
            report["grad_norm"] = float("nan") if step == 4 else 1.5
            report["num_skipped_steps"] += step == 4
            monitor.add_micro_batch((torch.zeros(4, 100, dtype=torch.int32),), 7.0)
            monitor.end_step()
        state = monitor.state_dict()
        monitor.close()
        monitor.close()
    assert state == {"num_steps": 15, "num_samples": 15 * 8}
    rows = list(csv.DictReader((tmp_path / "DeepSpeedJobName" / "metrics.csv").open()))
    assert [int(row["step"]) for row in rows] == list(range(1, 16))
    assert [int(row["samples"]) for row in rows] == [8 * n for n in range(1, 16)]
    assert {row["Train/Samples/train_loss"] for row in rows} == {"7.0"}
    assert [row["patrickstar/grad_norm"] for row in rows[3:6]] == ["1.5", "", "1.5"]
    last = rows[9]
    assert last["patrickstar/skipped_steps"] == "1"
    assert (last["patrickstar/device_gib"], last["patrickstar/host_gib"]) == ("3.0", "5.0")
    seconds = 0.125 * 10  # one reading as each step begins, and one at the end
    assert float(last["patrickstar/tokens_per_second"]) == pytest.approx(2 * 10 * 400 / seconds)
    rate = (4 * 10**9 + 2 * 10**6) * 10 * 400 / seconds / 1e12
    assert float(last["patrickstar/peak_share"]) == pytest.approx(rate / 64)
    assert float(last["patrickstar/samples_per_second"]) == pytest.approx(2 * 10 * 4 / seconds)
    assert float(last["patrickstar/model_tflops"]) == pytest.approx((4e9 + 2e6) * 10 * 400 / seconds / 1e12)
    assert lines() == []


def test_flops_of_a_step(tmp_path, capsys):
    file = tmp_path / "deep" / "flops.txt"
    config = make_config(default_chunk_size=8192, device_memory="600KB")
    asked = FlopsProfilerConfig(enabled=True, profile_step=2, output_file=str(file), top_modules=2)
    watched = watch(CASE, config, MonitorOptions(flops_profiler=asked), steps=4)
    assert_same(watched.run, train(CASE, config, steps=4, accumulate=ACCUMULATE))
    text = file.read_text()
    tokens, width, vocabulary = ACCUMULATE * BATCH * LENGTH, WIDTH, 97
    head = 2 * tokens * width * vocabulary
    forward = 3 * 2 * (2 * tokens * width * 2 * width) + head
    assert text.startswith("flops of step 3: ")
    assert f"forward      {forward / 1e6:.4g} MFLOP in 2 micro-batches" in text
    assert f"of step 3: {3 * forward / 1e6:.4g} MFLOP" in text
    assert f"by formula   {6 * watched.num_parameters * tokens / 1e6:.4g} MFLOP" in text
    listed = re.findall(r"depth (\d) +(\S+): .* in forward, (.+) %", text)
    first = 2 * tokens * width * 2 * width
    shares = [f"{100 * flops / forward:.1f}" for flops in (head, 2 * first, 2 * first, first, first)]
    names = [("1", "head"), ("2", "layers.0"), ("2", "layers.1"), ("3", "layers.0.0"), ("3", "layers.0.2")]
    assert listed == [(*name, share) for name, share in zip(names, shares, strict=True)]
    assert capsys.readouterr().out == ""  # it went to the file


def test_the_example_of_the_documentation(lines):
    text = (Path(__file__).parents[2] / "docs" / "logging.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block, "logging.md", "exec"), {"__name__": "docs"})
    number = r"[0-9.e+-]+"
    figures = rf"loss {number}  grad norm {number}  lr 3.00e-4  device {number} KiB  host 0 bytes"
    rest = rf"{number} [mu]?s/step  {number}[kM]? tokens/s  {number} [MG]FLOPS  stalled {number} %( \([a-z ]+\))?"
    assert len(lines()) == 2
    for line, step in zip(lines(), (5, 10), strict=True):
        assert re.fullmatch(rf"step {step}  {figures}  {rest}", line), line


def test_the_line():
    figures = StepFigures(
        step=120,
        loss=2.31416,
        grad_norm=0.8712,
        lr=3e-4,
        device_name="gpu",
        device_bytes=int(23.14 * 2**30),
        host_bytes=int(102.3 * 2**30),
        step_seconds=1.2449,
        tokens_per_second=13210.0,
        samples_per_second=13.0,
        tflops=353.2,
        peak_share=0.4967,
        stalls=Stalls({"adam on host": 0.02, "uploads": 0.01}),
    )
    assert figures.text() == (
        "step 120  loss 2.3142  grad norm 0.871  lr 3.00e-4  gpu 23.1 GiB  host 102 GiB  1.24 s/step  13.2k tokens/s  "
        "353 TFLOPS  SOL 50 %  stalled 3 % (adam on host)"
    )
    small = StepFigures(step=1, device_bytes=12 * 2**20, step_seconds=0.0053, tokens_per_second=999.9, tflops=3.2e-3)
    assert small.text() == "step 1  device 12 MiB  5.3 ms/step  1k tokens/s  3.2 GFLOPS"
    assert StepFigures(step=1).text() == "step 1"
    skipped = StepFigures(step=2, loss_scale=32768.0, num_skipped=1, samples_per_second=2.5, stalls=Stalls({}))
    assert skipped.text() == "step 2  loss scale 32768  skipped 1  2.5 samples/s  stalled 0 %"
    assert set(figures.metrics()) <= set(METRICS)
    assert StepFigures(step=3, loss=float("nan")).metrics() == {}


def test_sizes_of_batches():
    cases = [
        ({"labels": torch.zeros(4, 6, dtype=torch.int64), "input_ids": torch.zeros(4, 5, dtype=torch.int64)}, 4, 20),
        (UserDict({"input_ids": torch.zeros(3, 5, dtype=torch.int32)}), 3, 15),
        ([torch.zeros(2, 7), (torch.zeros(2, 7, dtype=torch.int16),)], 2, 14),
        ({"mask": torch.ones(2, 7, dtype=torch.bool), "tokens": torch.zeros(2, 7, dtype=torch.int64)}, 2, 14),
        ({"images": torch.zeros(8, 3, 4, 4), "labels": torch.zeros(8, dtype=torch.int64)}, 8, 0),
        ({"scale": torch.tensor(1.0), "nothing": None, "x": torch.zeros(5, 2)}, 5, 0),
        (torch.zeros(6), 6, 0),
        (None, 0, 0),
    ]
    for batch, num_samples, num_tokens in cases:
        assert size_of_batch(batch) == BatchSize(num_samples, num_tokens)


def test_which_steps_are_traced():
    often = [2, 4, 6, 8, 10, 12]
    for interval, traced in ((1, often), (2, often), (3, [2, 5, 8, 11]), (6, [5, 11])):
        check_traced_steps(interval, traced)


def check_traced_steps(interval, traced):
    asked, taken, stalled = [], [], []
    given_up = {5}

    def start():
        asked.append(step + 1)

    def take():
        if asked[-1] in given_up:
            given_up.clear()
            return None
        taken.append((asked[-1], step))
        return {"seconds": 2.0, "stalled_seconds": {_C.StallCause.UPLOAD: 0.125, _C.StallCause.NORM: 0.375}}

    sampler = StallSampler(start, take)
    for step in range(1, 13):
        sampler.end_step(steps_until_line=-step % interval, steps_per_line=interval)
        stalled.append(sampler.latest)
    assert asked == traced
    assert all(at - of == (2 if of == 5 else 1) for of, at in taken)
    assert stalled[-1].by_cause == {"uploads": 0.0625, "norm": 0.1875}
    assert stalled[-1].text() == "stalled 25 % (norm)"


def test_tensorboard(monkeypatch, tmp_path):
    written = []

    class SummaryWriter:
        def __init__(self, log_dir):
            written.append(log_dir)

        def add_scalar(self, *event):
            written.append(event)

        def flush(self):
            written.append("flush")

        def close(self):
            written.append("close")

    options = MonitorOptions(tensorboard=TensorBoardConfig(enabled=True, output_path=str(tmp_path), job_name="job"))
    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    (sink,) = open_sinks(options)
    sink.write(3, 24, {"Train/Samples/train_loss": 0.5, "Train/Samples/lr": 0.1})
    sink.flush()
    sink.close()
    events = [("Train/Samples/train_loss", 0.5, 24), ("Train/Samples/lr", 0.1, 24)]
    assert written == [str(tmp_path / "job"), *events, "flush", "close"]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        open_sinks(options)


def test_wandb(monkeypatch):
    calls = []

    class WandbRun:
        def log(self, values, step):
            calls.append((values, step))

        def finish(self):
            calls.append("finish")

    def init(**options):
        calls.append(options)
        return WandbRun()

    stand_in = types.ModuleType("wandb")
    stand_in.run, stand_in.init = None, init
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    options = MonitorOptions(wandb=WandbConfig(enabled=True, group="g", team="t", project="p"))
    (sink,) = open_sinks(options)
    sink.write(3, 24, {"Train/Samples/lr": 0.1})
    sink.close()
    sink.close()
    assert calls == [{"project": "p", "group": "g", "entity": "t"}, ({"Train/Samples/lr": 0.1}, 24), "finish"]
    calls.clear()
    stand_in.run = WandbRun()
    (sink,) = open_sinks(options)
    sink.write(1, 1, {})
    sink.close()
    assert calls == [({}, 1)]  # the user's run goes on
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        open_sinks(options)


def test_csv_is_appended_to(tmp_path):
    options = MonitorOptions(csv_monitor=CsvMonitorConfig(enabled=True, output_path=str(tmp_path), job_name="job"))
    for step in (1, 2):
        (sink,) = open_sinks(options)
        sink.write(step, 8 * step, {"patrickstar/grad_norm": 0.5})
        sink.flush()
        assert sink.path.read_text().splitlines()[-1].startswith(f"{step},{8 * step},,")
        sink.close()
    lines = sink.path.read_text().splitlines()
    assert lines[0] == ",".join(["step", "samples", *METRICS])
    assert len(lines) == 3
    sink.path.write_text("step,loss\n")
    with pytest.raises(ValueError, match="other columns"):
        open_sinks(options)
    assert sink.path.read_text() == "step,loss\n"


def test_impossible_options():
    with pytest.raises(ValueError, match="steps_per_print is -1; give at least 1, or 0"):
        MonitorOptions(steps_per_print=-1)

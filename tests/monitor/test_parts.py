import sys
import types
from collections import UserDict

import pytest
import torch

from patrickstar import _C
from patrickstar.monitor import (
    CsvMonitorConfig,
    MonitorOptions,
    Stalls,
    StallSampler,
    TensorBoardConfig,
    WandbConfig,
    open_sinks,
)
from patrickstar.monitor.batch import BatchSize, size_of_batch
from patrickstar.monitor.figures import METRICS, StepFigures


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
        stalls=Stalls({"adam on host": 0.02, "uploads": 0.01}),
    )
    assert figures.text() == (
        "step 120  loss 2.3142  grad norm 0.871  lr 3.00e-4  gpu 23.1 GiB  host 102 GiB  1.24 s/step  13.2k tokens/s  "
        "353 TFLOPS  stalled 3 % (adam on host)"
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

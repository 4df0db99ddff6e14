import argparse
import json

import pytest
import torch

from benchmark import longest
from benchmark.launch import Outcome
from benchmark.systems import Job
from benchmark.systems.long_layers import HostInputs
from benchmark.systems.run import Run, run_system


def options(text):
    parser = argparse.ArgumentParser()
    longest.add_arguments(parser)
    return parser.parse_args(text.split())


def job(**values):
    common = {"system": "patrickstar", "model": "tiny-llama", "ranks": 2, "length": 64, "steps": 2, "tile_tokens": 16}
    common |= {"batch": 1, "clipping": 1.0, "gpu_bytes": None, "host_bytes": None, "warmup": 0}
    return Job(**{**common, "shares_sequence": True, "is_profiled": False, **values})


def done(given=None, outcome=Outcome.TRAINED, reason=""):
    return Run(
        given or job(), outcome, reason, init_seconds=2.0, slowest_step_seconds=[3.0, 1.0], losses=[7.0, 6.0],
        grad_norms=[2.0, 2.0], host_peak_bytes=16,
    )  # fmt: skip


def test_a_system_stops_at_its_first_failure_and_each_run_is_written_down(monkeypatch, tmp_path):
    tried = []

    def run(system, length, timeout, args):
        tried.append((system, length))
        fails = system == "fsdp2-offload" and length > 64
        reason = "rank 1: OutOfMemoryError: CUDA out of memory. Tried" if fails else ""
        outcome = Outcome.OUT_OF_MEMORY if fails else Outcome.TRAINED
        row = longest.record(done(job(system=system, length=length), outcome, reason))
        return {**row, "host_used_bytes": 2**30}

    monkeypatch.setattr(longest, "_run", run)
    monkeypatch.setattr(longest, "in_fresh_process", lambda function: {"gpu": "none", "torch_version": "2"})
    output = tmp_path / "rows.jsonl"
    systems = "--systems fsdp2-offload patrickstar --lengths 256 64 128"
    result = longest.run(options(f"{systems} --output {output}"))
    assert tried == [
        ("fsdp2-offload", 64), ("patrickstar", 64), ("fsdp2-offload", 128), ("patrickstar", 128), ("patrickstar", 256),
    ]  # fmt: skip
    assert [json.loads(text)["length"] for text in output.read_text().splitlines()] == [64, 64, 128, 128, 256]
    table = longest.format_table(result)
    print(table)
    assert "fsdp2-offload: 64 tokens, 128: out of device memory" in table
    assert "patrickstar: 256 tokens, and no longer one was tried" in table


def test_no_run_begins_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(longest, "in_fresh_process", lambda function: {})
    assert longest.run(options("--budget 1"))["rows"] == []


def test_a_row_has_the_times_of_the_slowest_rank():
    row = longest.record(done())
    assert row["outcome"] == longest.TRAINED and row["reason"] is None
    assert row["seconds"] == [3.0, 1.0] and row["losses"] == [7.0, 6.0] and row["build_seconds"] == 2.0
    assert row["host_peak_bytes"] == 16 and row["device_peak_bytes"] is None


def test_what_failed_runs_say_of_themselves():
    said = {
        "rank 0: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": longest.DEVICE,
        "rank 0: AcceleratorError: CUDA error: out of memory": longest.MEMORY,
        "rank 1: MemoryBudgetError: chunk 3 needs 64 MiB on cuda:0, 12 MiB are left": longest.DEVICE,
        "rank 1: MemoryBudgetError: host memory: chunk 3 needs 64 MiB": longest.HOST,
        "host memory: 250.1 GiB are used, 250.0 may be": longest.HOST,
        "rank 0: SIGKILL, as the host does when its memory is exhausted": longest.HOST,
        "rank 0: ValueError: 17 tokens": longest.FAILED,
    }
    assert {reason: longest.outcome_of(done(outcome=Outcome.FAILED, reason=reason)) for reason in said} == said
    assert longest.outcome_of(done(outcome=Outcome.TIMED_OUT, reason="more than 200 s")) == longest.TIME


def test_the_guard_counts_what_is_used(monkeypatch):
    used = [10, 20, 90, 95]
    monkeypatch.setattr(longest, "_used_bytes", lambda: used.pop(0))
    guard = longest.HostGuard(100, 8)
    assert guard.check() is None and guard.check() is None
    assert guard.check().startswith("host memory: ") and (guard.before_bytes, guard.peak_bytes) == (10, 95)


def test_ranks_are_ended_when_the_guard_says_so():
    ended = run_system(job(), timeout_seconds=60.0, log=print, guard=lambda: "host memory: too much")
    assert ended.outcome is Outcome.OUT_OF_MEMORY and ended.reason.startswith("host memory: too much")


def test_inputs_on_the_host_come_back_as_they_were(monkeypatch):
    monkeypatch.setattr("benchmark.systems.long_layers._PIECE_BYTES", 64)
    value = torch.randn(3, 5, 7, requires_grad=True)
    with HostInputs():
        squares = value.transpose(0, 2).square()
    squares.sum().backward()
    torch.testing.assert_close(value.grad, 2 * value.detach(), rtol=0, atol=0)


@pytest.mark.slow
def test_systems_train_alike():
    systems = "patrickstar fsdp2-offload fsdp2-offload-tiled"
    text = f"--model tiny-llama --lengths 256 --ranks 2 --steps 2 --tile-tokens 64 --systems {systems}"
    result = longest.run(options(text))
    print(longest.format_table(result))
    assert [(row["system"], row["outcome"]) for row in result["rows"]] == [
        (name, "trained") for name in systems.split()
    ]
    first = result["rows"][0]
    for row in result["rows"]:
        assert row["losses"] == pytest.approx(first["losses"], rel=1e-3)
        assert row["grad_norms"] == pytest.approx(first["grad_norms"], rel=1e-2)

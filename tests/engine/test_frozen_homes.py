import itertools

import pytest
import torch

from tests.engine.test_quantized import TOWER, TRAINED_BYTES, Tower
from tests.models import Case
from tests.training import Run, assert_same, make_config, make_host_config, train

NUMEL = 12 * 4096
"""Of the frozen layers."""
ROOMY = {"bf16": 220_000, "fp16": 220_000, "fp32": 440_000}
"""Device memory for all values and small batches' activations, and not for those of long batches."""


def with_sizes(sizes: list[int], build=Tower) -> Case:
    steps = itertools.cycle(sizes)
    return Case(build, lambda generator: {"x": torch.randn(next(steps), 8, generator=generator)})


def moved(run: Run, key: str) -> list[int]:
    return [after[key] - before[key] for before, after in zip(run.chunk_reports, run.chunk_reports[1:], strict=False)]


def quantization(kind: str | None) -> dict:
    return {} if kind is None else {"quantization": {"type": kind}}


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kind", [None, "nf4"])
def test_what_stays_leaves_the_host(kind, precision):
    config = make_config(precision, default_chunk_size=4096, **quantization(kind))
    run = train(TOWER, {**config, "device_memory": ROOMY[precision]}, steps=8)
    hosts = [report["host_bytes"] for report in run.chunk_reports]
    print(f"host bytes by step: {hosts}")
    itemsize = 4 if precision == "fp32" else 2
    if kind is None:
        assert hosts[0] >= itemsize * NUMEL
    assert run.report["host_peak_bytes"] >= (NUMEL // 2 if kind else itemsize * NUMEL)
    assert hosts[-1] == 0 and run.report["device_peak_bytes"] <= ROOMY[precision]
    assert not any(moved(run, "uploaded_bytes")[2:] + moved(run, "downloaded_bytes")[2:])
    assert_same(run, train(TOWER, config, steps=8))


@pytest.mark.parametrize("kind", [None, "nf4"])
def test_what_comes_and_goes_keeps_its_copy(kind):
    config = make_host_config("bf16", default_chunk_size=4096, device_memory=70_000, **quantization(kind))
    run = train(TOWER, config, steps=9)
    assert moved(run, "uploaded_bytes")[-1] > 2 * TRAINED_BYTES
    assert set(moved(run, "downloaded_bytes")[1:]) == {TRAINED_BYTES}
    assert_same(run, train(TOWER, make_config("bf16", default_chunk_size=4096, **quantization(kind)), steps=9))


@pytest.mark.parametrize(("kind", "device_memory", "size"), [(None, 220_000, 56), ("nf4", 220_000, 72)])
def test_pressure_takes_it_down_once(kind, device_memory, size):
    sizes = [4] * 8 + [size] * 3 + [4, size] * 2
    config = make_config("bf16", default_chunk_size=4096, **quantization(kind))
    run = train(with_sizes(sizes), {**config, "device_memory": device_memory}, steps=len(sizes))
    down = moved(run, "downloaded_bytes")
    print(f"down by step: {down}, evictions {run.report['num_pressure_evictions']}")
    assert run.chunk_reports[7]["host_bytes"] == 0 < run.chunk_reports[8]["host_bytes"]
    states = 6 * TRAINED_BYTES  # of what is trained, which pressure takes down as well
    assert states < down[7] <= states + (NUMEL if kind else 2 * NUMEL)
    assert max(down[8:]) <= states
    assert run.report["device_peak_bytes"] <= device_memory
    assert_same(run, train(with_sizes(sizes), config, steps=len(sizes)))


class HalfTrained(Tower):
    def __init__(self):
        super().__init__()
        self.layers[9:].requires_grad_(True)


def test_updates_ahead_take_the_room_and_give_it_back():
    def run(**more):
        config = make_host_config("fp16", default_chunk_size=4096, **more)  # which needs room to update ahead
        config["optimizer"]["speculation"] = "always"
        return train(with_sizes(sizes, HalfTrained), config, steps=len(sizes))

    sizes = [4] * 9 + [56] * 3 + [4]
    limited = run(device_memory=200_000, host_memory=280_000)
    started, down = moved(limited, "num_speculated_updates"), moved(limited, "downloaded_bytes")
    print(f"started {started}, down {down}, host {[report['host_bytes'] for report in limited.chunk_reports]}")
    assert started[:4] == [0] * 4 and started[5:8] == [4] * 3
    assert down[8] > down[7] == down[10]
    assert limited.report["host_peak_bytes"] <= 280_000
    assert_same(limited, run())


class Trained(Tower):
    def __init__(self):
        super().__init__()
        self.requires_grad_(True)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_trained_values_leave_with_their_states(precision):
    limit, rooms = 2_000_000, []

    def look(engine, step):
        rooms.append(engine._session.runtime.host_room_of_activations())

    config = make_config(precision, default_chunk_size=4096, device_memory="4MB", host_memory=limit)
    run = train(Case(Trained, TOWER.batch), config, steps=8, before_step=look)
    print(f"room by step: {rooms} of {limit}")
    assert run.report["num_device_state_chunks"] == 13
    assert rooms[0] < limit - 2 * NUMEL
    assert rooms[-1] > limit - 3 * 4 * 4096


def test_what_has_left_can_be_unfrozen():
    def look(engine, step):
        if step == 7:
            before.append(engine.full_value(engine.module.layers[5].weight).clone())
            engine.module.layers[5].requires_grad_(True)
        elif step == 8:
            with torch.no_grad():
                values.append(engine.full_value(engine.module.layers[3].weight).clone())
                engine.module.layers[3].weight.mul_(0.5)

    def run(**more):
        config = make_config("bf16", default_chunk_size=4096, **more)
        return train(TOWER, config, steps=10, before_step=look, model_parameters=lambda model: [*model.parameters()])

    values: list[torch.Tensor] = []
    before: list[torch.Tensor] = []
    limited, unlimited = run(device_memory=ROOMY["bf16"], host_memory=400_000), run()
    assert limited.chunk_reports[6]["host_bytes"] == 0
    assert torch.equal(*values) and torch.equal(*before)
    assert not torch.equal(limited.state["layers.5.weight"].float(), before[0].float())
    assert_same(limited, unlimited)

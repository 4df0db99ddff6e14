import pytest
import torch
from torch import nn

from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

MIB = 2**20
WIDTH, DEPTH = 2048, 24  # a layer: 16 MiB
STEPS = 5
BUDGET = 640 * MIB  # layers and gradients alone take 768 MiB; inputs, activations and workspaces up to 200 MiB
LATE_CYCLES = 20_000_000  # some 10 ms: the launching thread is far ahead of the device


class Layers(nn.Module):
    def __init__(self, between=lambda index: None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.between = between

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index > 0:
                self.between(index)
            x = torch.tanh(layer(x))
        return x.square().mean()


class Branches(Layers):
    """Every other layer runs on its own stream, beside the layer before it."""

    def __init__(self):
        super().__init__()
        self.stream = torch.cuda.Stream()

    def forward(self, x):
        main = torch.cuda.current_stream()
        for one, other in zip(self.layers[::2], self.layers[1::2], strict=True):
            self.stream.wait_stream(main)
            with torch.cuda.stream(self.stream):
                y = torch.tanh(other(x))
            x = torch.tanh(one(x))
            main.wait_stream(self.stream)
            y.record_stream(main)
            x = x + y
        return x.square().mean()


def train(build, before_forward=lambda: None, **config):
    torch.manual_seed(0)
    options = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "default_chunk_size": MIB, **config}
    engine, optimizer = initialize_engine(build, 0, options)
    with engine:
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(STEPS):
            x = torch.randn(64, WIDTH, generator=generator)
            before_forward()
            loss = engine(x)
            engine.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        report = engine.report()
        return torch.stack(losses).cpu(), engine.state_dict(), report


def assert_same_run(run, expected):
    assert_same_bits(run[0], expected[0], "losses")
    for name, value in expected[1].items():
        assert_same_bits(run[1][name], value, name)


def test_an_input_prefetcher_on_a_stream_of_its_own_makes_room_without_harm():
    """The device is behind and has not yet read the weights that leave; the prefetcher's stream is idle. It takes more
    memory with each step, which no plan has foreseen.
    """
    expected = train(Layers)
    copies = torch.cuda.Stream()
    held = []
    steps = 0

    def prefetch(index):
        if index % 3 == 0:
            with torch.cuda.stream(copies):
                held.append(torch.empty((index + 24 * steps) * MIB, dtype=torch.uint8, device="cuda"))
        if len(held) > 1:
            held.pop(0)

    def fall_behind():
        nonlocal steps
        steps += 1
        held.clear()
        torch.cuda.empty_cache()
        torch.cuda._sleep(LATE_CYCLES)

    run = train(lambda: Layers(prefetch), fall_behind, device_memory=BUDGET)
    print({key: run[2][key] for key in ("num_pressure_evictions", "num_evictions", "device_peak_bytes")})
    assert run[2]["num_pressure_evictions"] > 0
    assert_same_run(run, expected)


def test_layers_on_a_second_stream():
    expected = train(Branches)
    run = train(Branches, lambda: torch.cuda._sleep(LATE_CYCLES), device_memory=BUDGET)
    assert run[2]["num_evictions"] > 0
    assert_same_run(run, expected)


def test_steps_under_another_stream():
    expected = train(Layers)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    count = 0

    def switch():
        nonlocal count
        count += 1
        torch.cuda.set_stream(streams[count >= 3])

    try:
        run = train(Layers, switch, device_memory=BUDGET)
    finally:
        torch.cuda.set_stream(streams[0])
    assert_same_run(run, expected)

import itertools
import logging

import pytest
import torch
from torch import nn

from patrickstar import _C
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import Case, gpt2, llama, token_batch
from tests.quant.formulas import dequantized
from tests.training import Run, assert_same, make_config, make_host_config, train, train_once

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def frozen_llama() -> nn.Module:
    model = llama()
    for name, param in model.named_parameters():
        param.requires_grad_("proj" not in name)
    return model


CASE = Case(frozen_llama, token_batch)


def linear_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if "proj" in name]


def plain_model(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = frozen_llama()
    with torch.no_grad():
        for name in linear_names(model):
            weight = model.get_parameter(name)
            weight.copy_(dequantized(weight, kind, dtype))
    for param in model.parameters():  # an engine leaves buffers as they are
        param.data = param.data.to(dtype)
    return model


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_values_are_those_of_the_formulas(kind, precision):
    dtype = DTYPES[precision]
    plain = plain_model(kind, dtype)
    batch = token_batch(torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = frozen_llama()
    engine, _ = initialize_engine(lambda: model, 0, make_config(precision, quantization={"type": kind}))
    with engine:
        state = engine.state_dict()
        for name in linear_names(plain):
            assert_same_bits(state[name].to(dtype), plain.state_dict()[name], name)
        loss = engine(**batch).loss
        assert loss.item() == plain(**batch).loss.item()
    for name in linear_names(plain):
        assert_same_bits(model.get_parameter(name).detach().to(dtype), plain.state_dict()[name], name)


def test_training_is_that_of_plain_pytorch():
    plain = plain_model("nf4", torch.float32)
    optimizer = torch.optim.AdamW([param for param in plain.parameters() if param.requires_grad], lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(6):
        loss = plain(**token_batch(generator)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    config = make_config(quantization={"type": "nf4"})
    config["optimizer"]["params"] = {"lr": 1e-3, "weight_decay": 0.01}
    run = train(CASE, config, steps=6)
    assert run.losses[0] == losses[0]
    assert run.losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_budgets_change_no_bit(kind):
    config = {"quantization": {"type": kind}}
    reference = train_once(CASE, make_config("bf16", **config), steps=5)
    assert len({report["uploaded_bytes"] for report in reference.chunk_reports}) == 1
    small = train(CASE, make_host_config("bf16", device_memory=150_000, default_chunk_size=2048, **config), steps=5)
    assert small.report["num_evictions"] > 0 and small.report["uploaded_bytes"] > 0
    assert_same(small, reference)
    assert_same(
        train(CASE, make_config("bf16", device_memory=220_000, default_chunk_size=2048, **config), 5), reference
    )
    assert_same(train(CASE, make_config("bf16", default_chunk_size=1024, **config), 5), reference)
    tight = make_config("bf16", device_memory=500_000, host_memory=260_000, default_chunk_size=2048, **config)
    assert_same(train(CASE, tight, 5), reference)
    delays = {"link_gbps": 0.05, "max_random_us": 200}
    late = make_host_config("bf16", device_memory=150_000, default_chunk_size=2048, delays=delays, **config)
    assert_same(train(CASE, late, 5), reference)


@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "commit"},
        {"speculation": "always", "states": "8bit"},
        {"speculation": "commit", "master": "stochastic"},
    ],
)
def test_states_of_what_is_trained_beside(options):
    def run(**more):
        config = make_config("bf16", quantization={"type": "nf4"}, default_chunk_size=4096, **more)
        config["optimizer"] |= options
        return train(TOWER, config, steps=4)

    reference = run()
    for device_memory in (40_000, 110_000):
        limited = run(device_memory=device_memory)
        assert limited.report["num_evictions"] > 0
        assert limited.report["device_peak_bytes"] <= device_memory
        assert_same(limited, reference)


class Tower(nn.Module):
    """Frozen layers above a trained one; with width 64 each layer fills a chunk of 4096 elements."""

    def __init__(self, num_layers: int = 12, width: int = 64):
        super().__init__()
        self.first = nn.Linear(8, width)
        layers = (nn.Linear(width, width, bias=False).requires_grad_(False) for _ in range(num_layers))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.float().square().mean()}


def tower_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 8, generator=generator)}


TOWER = Case(Tower, tower_batch)


TRAINED_BYTES = 2 * (8 * 64 + 128)
"""Bytes of the trained layer's compute value (or gradient), padded."""


def tower_bytes(**config) -> tuple[int, int]:
    """Uploaded and downloaded bytes of the last step, which has a plan."""
    config = make_host_config("bf16", default_chunk_size=4096, device_memory=30_000, **config)
    reports = train(TOWER, config, steps=6).chunk_reports
    moved = tuple(reports[-1][key] - reports[-2][key] for key in ("uploaded_bytes", "downloaded_bytes"))
    assert moved == (reports[-1]["planned_uploaded_bytes"], reports[-1]["planned_downloaded_bytes"])
    return moved


def test_bytes_over_the_link():
    whole, whole_down = tower_bytes()
    num_fetches, rest = divmod(whole - 2 * TRAINED_BYTES, 2 * 4096)
    assert rest == 0 and num_fetches >= 20  # 24 uses: 12 layers, forward and backward
    for kind, num_bytes in (("nf4", 4096 / 2 + 4096 / 64 + 8), ("int8", 4096 + 4 * 4096 / 256)):
        quantized, down = tower_bytes(quantization={"type": kind})
        print(f"{kind}: {quantized} bytes up per step, {down} down; in 16 bits {whole} and {whole_down}")
        num_quantized, rest = divmod(quantized - 2 * TRAINED_BYTES, num_bytes)
        assert rest == 0 and num_fetches <= num_quantized <= 24  # dequantised values take room too
        assert down == whole_down == TRAINED_BYTES


def test_codes_move_to_the_device():
    config = make_config("bf16", default_chunk_size=4096, quantization={"type": "nf4"})
    roomy = train(TOWER, {**config, "device_memory": 110_000}, steps=6)
    rows = roomy.chunk_reports
    assert rows[-1]["num_device_state_chunks"] == 1
    assert rows[-1]["num_device_quantized_chunks"] == 12
    assert rows[-1]["num_evictions"] > rows[-2]["num_evictions"]
    assert rows[-1]["uploaded_bytes"] == rows[-2]["uploaded_bytes"]
    assert rows[-1]["downloaded_bytes"] == rows[-2]["downloaded_bytes"]
    assert_same(roomy, train(TOWER, config, steps=6))


def test_host_memory_is_that_of_the_codes():
    numel = 12 * 4096
    config = make_host_config("bf16", default_chunk_size=4096, device_memory=60_000)
    whole = train(TOWER, config, steps=3).report
    quantized = train(TOWER, {**config, "quantization": {"type": "nf4"}}, steps=3).report
    saved = whole["predicted_host_peak_bytes"] - quantized["predicted_host_peak_bytes"]
    print(f"predicted: {saved} bytes saved of {2 * numel}; peak {quantized['host_peak_bytes']}")
    assert saved > (2 - 0.52) * numel * 0.9
    assert quantized["host_peak_bytes"] <= quantized["predicted_host_peak_bytes"]


def chunk_kinds(engine) -> dict[str, _C.QuantType]:
    session = engine._session
    return {spec.name: spec.quantization for spec in session.plan_of_params.chunked}


def test_which_weights():
    model = llama()
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    config = make_config(quantization={"type": "NF4", "skip_modules": ["up_proj", "layers.0"]})
    with initialize_engine(lambda: model, 0, config)[0] as engine:
        found = {name for name, kind in chunk_kinds(engine).items() if kind is _C.QuantType.NF4}
    expected = {name for name in linear_names(llama()) if "layers.1" in name and "up_proj" not in name}
    assert found == expected and len(found) == 6
    conv = gpt2().requires_grad_(False)
    conv.transformer.ln_f.requires_grad_(True)
    with initialize_engine(lambda: conv, 0, make_config(quantization={"type": "int8"}))[0] as engine:
        found = {name for name, kind in chunk_kinds(engine).items() if kind is _C.QuantType.INT8}
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert found == {f"transformer.h.{i}.{layer}.weight" for i in range(2) for layer in layers}


def test_wrong_configurations():
    for section, message in (
        ({"type": "fp4"}, r"quantization.type is 'fp4'"),
        ({"typ": "nf4"}, r"quantization.typ"),
        ({"skip_modules": 3}, "give a list of names"),
    ):
        with pytest.raises(ValueError, match=message):
            initialize_engine(frozen_llama, 0, make_config(quantization=section))
    with pytest.raises(ValueError, match=r"skip_modules names 'gates', which is no module"):
        initialize_engine(frozen_llama, 0, make_config(quantization={"skip_modules": ["gates"]}))
    with pytest.raises(ValueError, match=r"quantization is 'int8', but no weight of a linear layer of Llama"):
        initialize_engine(llama, 0, make_config(quantization={"type": "int8"}))
    model = frozen_llama()
    name = linear_names(model)[2]
    with torch.no_grad():
        model.get_parameter(name)[3, 3] = float("nan")
    with pytest.raises(ValueError, match=rf"{name}.*NaN or infinite"):
        initialize_engine(lambda: model, 0, make_config(quantization={}))


def test_a_quantised_weight_cannot_be_trained():
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(
        frozen_llama,
        0,
        make_config(quantization={}),
        lambda module: [p for p in module.parameters() if p.requires_grad],
    )
    with engine:
        name = linear_names(engine.module)[0]
        weight = engine.module.get_parameter(name)
        batch = token_batch(torch.Generator().manual_seed(1))
        engine.backward(engine(**batch).loss)
        optimizer.step()
        weight.requires_grad_(True)
        optimizer.add_param_group({"params": [weight]})
        with pytest.raises(ValueError, match=rf"{name} requires grad by now, but is quantised \(nf4\)"):
            engine(**batch)


def test_a_resize_is_refused():
    engine, _ = initialize_engine(frozen_llama, 0, make_config(quantization={}))
    with engine, pytest.raises(_C.StateError, match="with quantised weights is not supported yet"):
        engine.resize(1)


def test_values_that_are_written():
    torch.manual_seed(0)
    engine, _ = initialize_engine(frozen_llama, 0, make_config("bf16", quantization={"type": "nf4"}))
    with engine:
        state = engine.state_dict()
        engine.load_state_dict(state)
        assert_same_bits(dict(engine.state_dict()), dict(state))
        name = linear_names(engine.module)[1]
        new = torch.randn_like(state[name].float()) * 0.1
        with torch.no_grad():
            engine.module.get_parameter(name).copy_(new)
        expected = dequantized(new, "nf4", torch.bfloat16)
        assert_same_bits(engine.state_dict()[name].to(torch.bfloat16), expected)


def test_what_the_log_says(caplog):
    with caplog.at_level(logging.INFO, logger="patrickstar"):
        train(TOWER, make_config("bf16", default_chunk_size=4096, quantization={"type": "nf4"}), steps=1)
    assert "(576 train, 49.2k are in nf4) in bfloat16" in caplog.text
    assert "optimizer states all on the device, 12 of 12 quantised chunks on the device" in caplog.text


def test_checkpoints(tmp_path):
    def run(steps, *, load=False, save=False, seed=0):
        torch.manual_seed(seed)
        config = make_config("bf16", device_memory=400_000, default_chunk_size=2048, quantization={"type": "nf4"})
        engine, optimizer = initialize_engine(frozen_llama, 0, config)
        with engine:
            if load:
                engine.load_checkpoint(tmp_path)
            generator = torch.Generator().manual_seed(steps)
            for _ in range(steps):
                engine.backward(engine(**token_batch(generator)).loss)
                optimizer.step()
                optimizer.zero_grad()
            if save:
                engine.save_checkpoint(tmp_path)
            return dict(engine.state_dict())

    saved = run(3, save=True)
    assert_same_bits(run(0, load=True), saved)
    assert_same_bits(run(2, load=True), run(2, load=True))
    other = run(0, load=True, seed=5)
    for name, value in saved.items():
        if "proj" in name:  # quantised once more
            torch.testing.assert_close(other[name].float(), value.float(), rtol=0.05, atol=2e-3)
        else:
            assert_same_bits(other[name], value, name)


NUMEL = 12 * 4096
"""Elements of the frozen layers."""
ROOMY = {"bf16": 220_000, "fp16": 220_000, "fp32": 440_000}
"""Room for all values and the activations of small batches, but not of long ones."""


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
    states = 6 * TRAINED_BYTES  # trained states, which leave under pressure as well
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
        config = make_host_config("fp16", default_chunk_size=4096, **more)  # needs room for speculative updates
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

"""A trace without most repeating layers, extended, is the trace of the whole model."""

import dataclasses

import pytest
import torch
from torch import nn

from patrickstar.config import LossComputation, QuantizationConfig, QuantizationType
from patrickstar.module.preprocess import plan_params
from patrickstar.planning import uses as tracing
from patrickstar.planning.images import Images
from patrickstar.planning.known_models import KNOWN_MODELS
from patrickstar.planning.machines import H200
from patrickstar.planning.models import build_model
from patrickstar.planning.question import Workload
from patrickstar.planning.repeated_layers import Stack, find_repetition
from patrickstar.planning.uses import trace_uses

LENGTH = 32
FEW = ["llama-3.1-8b", "qwen3-30b-a3b", "gpt2", "deepseek-v3", "gemma-2-2b"]
IRREGULAR = {"gemma-3-270m", "gemma-3n-e2b", "gemma-3n-e4b"}
"""Models of which no layer is left out: too few periods, or layers that read others' keys and values."""
CASES = {
    "no checkpoints": {"checkpointing": False},
    "LoRA on a quantised base": {"lora_rank": 4, "quantization": QuantizationType.NF4},
    "tiles and a fused loss": {"length": 8192, "tile_tokens": 4096, "loss": LossComputation.FUSED},
}


@dataclasses.dataclass
class Traced:
    uses: tracing.StepUses
    num_layers: list[int]
    """Layers in each trace that was made."""
    has_repetition: bool


def traced(monkeypatch, name, may_repeat, **changes):
    workload = Workload(model=name, batch=1, **{"length": LENGTH, "checkpointing": True, **changes})
    model = build_model(
        name,
        1,
        workload.length,
        checkpointing=workload.checkpointing,
        lora_rank=workload.lora_rank,
        prepare=workload.change,
        images=workload.images,
    )
    quantization = None if workload.quantization is None else QuantizationConfig(type=workload.quantization)
    params = plan_params(model.module, torch.bfloat16, use_cpu_embedding=False, quantization=quantization)
    return trace(monkeypatch, model.module, params, model.inputs, may_repeat, model.stack)


def trace(monkeypatch, module, params, inputs, may_repeat, stack=None):
    repetition = find_repetition(stack or Stack(module), params) if may_repeat else None
    layers = None if repetition is None else repetition.layers
    num_layers = []
    once = tracing._Tracer.trace

    def counted(tracer):
        num_layers.append(0 if layers is None else len(layers))
        return once(tracer)

    with monkeypatch.context() as patch:
        patch.setattr(tracing, "find_repetition", lambda *_: repetition)
        patch.setattr(tracing._Tracer, "trace", counted)
        uses = trace_uses(module, params, torch.bfloat16, inputs, H200.gpu)
    return Traced(uses, num_layers, repetition is not None)


def check_same(one, other):
    for field in dataclasses.fields(one):
        if field.name.startswith("_") or field.name == "calls":
            continue
        assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert len(one.calls) == len(other.calls)
    for call, same in zip(one.calls, other.calls, strict=True):
        assert dataclasses.astuple(call) == pytest.approx(dataclasses.astuple(same), rel=1e-9)


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in KNOWN_MODELS])
def test_known_models(monkeypatch, name):
    few = traced(monkeypatch, name, True)
    assert few.has_repetition == (name not in IRREGULAR)
    assert len(few.num_layers) == 1  # nothing was traced again
    if few.has_repetition:
        check_same(few.uses, traced(monkeypatch, name, False).uses)


@pytest.mark.parametrize("case", CASES)
def test_other_work(monkeypatch, case):
    few = traced(monkeypatch, "llama-3.1-8b", True, **CASES[case])
    assert few.num_layers == [4]  # of 32
    check_same(few.uses, traced(monkeypatch, "llama-3.1-8b", False, **CASES[case]).uses)


@pytest.mark.parametrize(("name", "num_traced"), [("qwen3-vl-2b", 7), ("smolvlm-256m", 4)])
def test_images(monkeypatch, name, num_traced):
    """The decoder's layers are left out, but not the first three of Qwen3-VL, to which results of the tower are added.
    Towers are traced whole: they read their layers' results by number.
    """
    case = {"images": Images(1, 448, 448), "length": 1152}
    few = traced(monkeypatch, name, True, **case)
    assert few.num_layers == [num_traced]
    check_same(few.uses, traced(monkeypatch, name, False, **case).uses)


class Layer(nn.Module):
    def __init__(self, index, width=8):
        super().__init__()
        self.layer_idx = index
        self.linear = nn.Linear(8, width, bias=False)
        self.back = nn.Linear(width, 8, bias=False)

    def forward(self, values):
        return values + self.back(self.linear(values))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(8, 8)

    def forward(self, values):
        for layer in self.layers:
            values = layer(values)
        return {"loss": self.last(values).sum()}


class LaterTwice(Layer):
    """Computes more from layer 2 on, which no attribute shows."""

    def forward(self, values):
        return super().forward(super().forward(values) if self.layer_idx >= 2 else values)


def small(monkeypatch, layers, may_repeat=True):
    with torch.device("meta"):
        model = Model(layers())
    params = plan_params(model, torch.bfloat16, use_cpu_embedding=False)
    return trace(monkeypatch, model, params, {"values": torch.ones(4, 8)}, may_repeat)


@pytest.mark.parametrize(
    "layers, num_traced",
    [
        (lambda: [Layer(index) for index in range(12)], [4]),
        (lambda: [Layer(index, 8 + 8 * (index % 2)) for index in range(12)], [8]),
        (lambda: [Layer(0, 24), *(Layer(index) for index in range(1, 12))], [5]),
        (lambda: [LaterTwice(index) for index in range(12)], [4, 12]),
    ],
    ids=["equal", "alternating", "another first", "differing in secret"],
)
def test_layers(monkeypatch, layers, num_traced):
    few = small(monkeypatch, layers)
    assert few.num_layers == num_traced
    check_same(few.uses, small(monkeypatch, layers, may_repeat=False).uses)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [Layer(index) for index in range(4)],
        lambda: [Layer(index, 8 * (index + 1)) for index in range(12)],
        lambda: [Layer(0)] * 12,
    ],
    ids=["few", "all different", "shared"],
)
def test_what_does_not_repeat(monkeypatch, layers):
    assert not small(monkeypatch, layers).has_repetition

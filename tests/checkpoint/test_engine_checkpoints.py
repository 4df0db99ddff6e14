import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from patrickstar import CheckpointError, StateError, torch_scope
from patrickstar.checkpoint import Checkpoint, latest_tag
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.models import MODELS, VOCAB, Case, ConvNet, Mlp, gpt2, image_batch, token_batch
from tests.training import make_config


class Rest(Mlp):
    """Has everything beside chunks: a layer with PyTorch, buffers, extra state, a parameter without elements."""

    def __init__(self):
        super().__init__()
        with torch_scope():
            self.scoped = nn.Linear(32, 32)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.note = "none"

    def forward(self, input_ids, labels):
        self.calls += 1
        self.note = f"call {int(self.calls)}"
        out = super().forward(input_ids, labels)
        return {"loss": out["loss"] + self.scoped(self.embed.weight.float()).square().mean()}

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


CASES = {
    **{name: MODELS[name] for name in ("gpt2", "lora", "conv_net", "unused", "frozen", "shared")},
    "rest": Case(Rest, token_batch),
    "channels_last": Case(lambda: ConvNet().to(memory_format=torch.channels_last), image_batch),
}


def start(case, precision="bf16", seed=0, **config):
    torch.manual_seed(seed)
    return initialize_engine(case.build, 0, make_config(precision, gradient_clipping=1.0, **config))


def steps(case, engine, optimizer, count, seed):
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(count):
        loss = case.loss(engine(**case.batch(generator)))
        engine.backward(loss)
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_every_bit_comes_back(tmp_path, name, precision):
    case = CASES[name]
    engine, optimizer = start(case, precision)
    with engine:
        steps(case, engine, optimizer, 3, seed=1)
        path = engine.save_checkpoint(tmp_path)
        assert path == tmp_path / "global_step3"
        states = copy.deepcopy((engine.state_dict(), optimizer.state_dict()))  # buffers are the live ones
        losses = steps(case, engine, optimizer, 2, seed=2)
        after = engine.state_dict(), optimizer.state_dict()
    engine, optimizer = start(case, precision, seed=5, default_chunk_size=4096)
    with engine:
        steps(case, engine, optimizer, 1, seed=3)
        assert engine.load_checkpoint(tmp_path) == (path, {})
        assert_same_bits((engine.state_dict(), optimizer.state_dict()), states)
        assert steps(case, engine, optimizer, 2, seed=2) == losses
        assert_same_bits((engine.state_dict(), optimizer.state_dict()), after)


def test_files_hold_what_the_state_dicts_say(tmp_path):
    case = MODELS["gpt2"]
    engine, optimizer = start(case)
    with engine:
        steps(case, engine, optimizer, 2, seed=1)
        path = engine.save_checkpoint(tmp_path, "mine")
        stored = {name: values for file in path.glob("*.safetensors") for name, values in load_file(file).items()}
        names = [name for name, _ in engine.module.named_parameters()]
        state = engine.state_dict()
        for name in names:
            assert_same_bits(stored[f"master/{name}"], state[name])
        for name, states in zip(names, optimizer.state_dict()["state"].values(), strict=True):
            assert_same_bits(stored[f"exp_avg/{name}"], states["exp_avg"])
            assert_same_bits(stored[f"exp_avg_sq/{name}"], states["exp_avg_sq"])
        assert_same_bits(stored["rng/rank0.torch"], torch.get_rng_state())
        with Checkpoint.find(tmp_path, "mine") as checkpoint:
            assert checkpoint.manifest.state["step_counts"] == dict.fromkeys(names, 2)


def test_other_budgets_and_precisions_load(tmp_path):
    case = MODELS["gpt2"]
    engine, optimizer = start(case, "fp32")
    with engine:
        steps(case, engine, optimizer, 2, seed=1)
        engine.save_checkpoint(tmp_path)
        saved = engine.state_dict()
    engine, optimizer = start(case, "bf16", seed=1, device_memory=400_000)
    with engine:
        engine.load_checkpoint(tmp_path)
        assert_same_bits(engine.state_dict(), saved)
        assert len(steps(case, engine, optimizer, 1, seed=2)) == 1


def test_a_layer_frozen_later(tmp_path):
    def frozen_embedding():
        model = Mlp()
        model.embed.weight.requires_grad_(False)
        return model

    cases = [Case(Mlp, token_batch), Case(frozen_embedding, token_batch)]
    for first, second in (cases, cases[::-1]):
        engine, optimizer = start(first, "fp32")
        with engine:
            steps(first, engine, optimizer, 2, seed=1)
            engine.save_checkpoint(tmp_path)
            saved = engine.state_dict()
        engine, optimizer = start(second, "fp32", seed=1)
        with engine:
            engine.load_checkpoint(tmp_path)
            assert_same_bits(engine.state_dict(), saved)
            steps(second, engine, optimizer, 1, seed=2)


def test_what_is_refused_changes_nothing(tmp_path):
    case = MODELS["mlp"]
    engine, optimizer = start(case)
    with engine:
        steps(case, engine, optimizer, 1, seed=1)
        engine.save_checkpoint(tmp_path / "a")
        with pytest.raises(CheckpointError, match=r"client_state\['model'\] is a torch.Tensor"):
            engine.save_checkpoint(tmp_path / "a", client_state={"model": torch.zeros(1)})
        loss = case.loss(engine(**case.batch(torch.Generator())))
        engine.backward(loss)
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(StateError, match="between backward and step"):
                call(tmp_path / "a")
        optimizer.step()
        assert latest_tag(tmp_path / "a") == "global_step1"
    engine, optimizer = start(MODELS["gpt2"])
    with engine:
        before = engine.state_dict(), optimizer.state_dict(), torch.get_rng_state()
        with pytest.raises(
            CheckpointError, match=r"not in the checkpoint: transformer.wte.weight, .* not in this model"
        ):
            engine.load_checkpoint(tmp_path / "a")
        with pytest.raises(CheckpointError, match="has no file 'latest'"):
            engine.load_checkpoint(tmp_path / "b")
        assert_same_bits((engine.state_dict(), optimizer.state_dict(), torch.get_rng_state()), before)
    engine, optimizer = initialize_engine(
        case.build, 0, make_config("bf16"), model_parameters=[{"params": "*bias"}, {"params": "*"}]
    )
    with engine:
        with pytest.raises(CheckpointError, match="same model_parameters"):
            engine.load_checkpoint(tmp_path / "a")
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        with pytest.raises(CheckpointError, match="parameter groups"):
            engine.load_checkpoint(tmp_path / "a", lr_scheduler=scheduler)
    with pytest.raises(StateError, match="closed"):
        engine.save_checkpoint(tmp_path)


def test_a_damaged_tensor_says_that_the_state_is_mixed(tmp_path):
    case = MODELS["mlp"]
    engine, optimizer = start(case)
    with engine:
        good = engine.save_checkpoint(tmp_path, "good")
        saved = engine.state_dict()
        path = engine.save_checkpoint(tmp_path, "bad")
        file = path / "rank00000-00000.safetensors"
        with Checkpoint(path) as checkpoint:
            name = list(saved)[1]
            offset = checkpoint.tensor(name, "master").shards[0].offset
        data = bytearray(file.read_bytes())
        data[offset] ^= 1
        file.write_bytes(data)
        steps(case, engine, optimizer, 1, seed=1)
        with pytest.raises(CheckpointError, match=rf"mixed; load another one: .*master of {name} .* is damaged"):
            engine.load_checkpoint(tmp_path)
        assert engine.load_checkpoint(tmp_path, "good") == (good, {})
        assert_same_bits(engine.state_dict(), saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_for_hugging_face(tmp_path, dtype):
    from transformers import GPT2LMHeadModel

    case = MODELS["gpt2"]
    engine, optimizer = start(case)
    with engine:
        steps(case, engine, optimizer, 2, seed=1)
        path = engine.export_weights(tmp_path / "model", dtype=dtype, max_file_bytes=20_000)
        state = engine.state_dict()
        with pytest.raises(CheckpointError, match="no empty folder"):
            engine.export_weights(tmp_path / "model")
    files = sorted(path.glob("model-*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert len(files) > 2
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]  # tied
    assert index["weight_map"].keys() == state.keys() - {"lm_head.weight"}
    model = GPT2LMHeadModel.from_pretrained(path, dtype="auto")
    assert model.dtype == dtype
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_same_bits(dict(model.state_dict()), {name: value.to(dtype) for name, value in state.items()})
    assert sorted(left.name for left in tmp_path.iterdir()) == ["model"]


def test_export_keeps_the_name_that_hugging_face_keeps(tmp_path):
    class OutputFirst(nn.Module):
        _tied_weights_keys = ["head.weight"]

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(32, VOCAB, bias=False)
            self.embed = nn.Embedding(VOCAB, 32)
            self.embed.weight = self.head.weight

        def forward(self, input_ids, labels):
            logits = self.head(self.embed(input_ids))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    engine, _ = start(Case(OutputFirst, token_batch))
    with engine:
        path = engine.export_weights(tmp_path / "model")
        assert [file.name for file in path.iterdir()] == ["model.safetensors"]
        assert_same_bits(load_file(path / "model.safetensors"), {"embed.weight": engine.state_dict()["embed.weight"]})
    assert gpt2().state_dict().keys() >= {"lm_head.weight"}

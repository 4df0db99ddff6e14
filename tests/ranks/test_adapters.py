import dataclasses

import peft
import pytest
import torch

from patrickstar import from_pretrained
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.ranks.on_mesh import MeshRun, checkpointed, train_all, train_plainly
from tests.ranks.sharded import Model
from tests.ranks.test_tensor_parallel import assert_alike, assert_close
from tests.ranks.test_training import relative_error


@dataclasses.dataclass(frozen=True)
class Adapted(Model):
    lora: dict = dataclasses.field(default_factory=dict)

    def build(self):
        lora = peft.LoraConfig(r=3, fan_in_fan_out=self.name == "gpt2", **self.lora)
        return peft.get_peft_model(super().build(), lora)


@dataclasses.dataclass(frozen=True)
class FromFiles(Adapted):
    folder: str = ""

    def build(self):
        return peft.get_peft_model(from_pretrained(self.folder), peft.LoraConfig(r=4, target_modules="all-linear"))


LLAMA = Adapted("llama")  # queries and values
ALL_LLAMA = Adapted("llama", lora={"target_modules": "all-linear", "use_rslora": True})
ALL_GPT2 = Adapted("gpt2", lora={"target_modules": "all-linear", "bias": "all"})
ALL_QWEN2 = Adapted("qwen2", lora={"target_modules": "all-linear", "bias": "all"})
ALL_BERT = Adapted("bert", lora={"target_modules": ["query", "key", "value", "dense"]})
TILES = {"activations": {"tile_tokens": 8}}


def compare(runs):
    num_ranks = runs[0].rows * runs[0].columns * runs[0].sequence
    by_rank = run_ranks(num_ranks, train_all, runs, timeout_seconds=300)
    compare_found(runs, by_rank)


def compare_found(runs, by_rank):
    for index, run in enumerate(runs):
        found, expected = [results[index] for results in by_rank], train_plainly(run)
        assert_alike(found)
        assert_close(found[0], expected)
        torch.manual_seed(0)
        model = run.model.build()
        start = model.state_dict()
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        for name, value in found[0]["state"].items():
            assert value.shape == start[name].shape
            assert torch.equal(value, start[name]) != (name in trained), name
        adapters = peft.get_peft_model_state_dict(model, state_dict=found[0]["state"])
        assert adapters.keys() == peft.get_peft_model_state_dict(model, state_dict=expected["state"]).keys()
        peft.set_peft_model_state_dict(model, adapters)
        assert_same_bits(dict(model.state_dict()), dict(found[0]["state"]))


def test_adapters_are_trained_as_by_peft(tmp_path):
    runs = [
        MeshRun(LLAMA, 1, 2),
        MeshRun(ALL_LLAMA, 1, 2, "1d", options=TILES),
        MeshRun(ALL_GPT2, 1, 2, checkpointing=True),
    ]
    runs = [dataclasses.replace(run, steps=4) for run in runs]
    torch.manual_seed(0)
    base = Model("llama").build()
    base.save_pretrained(tmp_path)
    by_files = [MeshRun(FromFiles("llama", folder=str(tmp_path)), 1, 2, mode, steps=2) for mode in ("2d", "1d")]
    by_rank = run_ranks(2, train_all, [*runs, *by_files], timeout_seconds=300)
    compare_found(runs, by_rank)
    inputs = by_files[0].batches()[0]
    loss = base.train()(**inputs).loss.item()
    values = base.state_dict()
    for results in by_rank:
        for found in results[len(runs) :]:
            assert found["losses"][0] == pytest.approx(loss, rel=1e-6)
            for name, value in found["state"].items():
                if "lora_" in name:
                    assert value.std() > 0 and value.shape == by_rank[0][len(runs)]["state"][name].shape
                else:
                    assert torch.equal(value, values[_base_name(name)])


def _base_name(name):
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "runs",
    [
        [MeshRun(model, 2, 2, kind="left") for model in (ALL_LLAMA, ALL_GPT2)],
        [MeshRun(LLAMA, 1, 2, sequence=2, sequence_mode="ring")],
        [MeshRun(ALL_BERT, 1, 2, "1d", kind="right"), MeshRun(ALL_BERT, 2, 1, kind="right")],
        [MeshRun(ALL_QWEN2, 1, 2, "1d"), MeshRun(ALL_QWEN2, 1, 2, checkpointing=False)],
    ],
    ids=["2x2", "sequences", "bert", "qwen2"],
)
def test_more_adapters(runs):
    compare(runs)


@pytest.mark.slow
def test_budgets_change_no_bit():
    budgets = (190_000, None)
    runs = [
        MeshRun(ALL_LLAMA, 1, 2, mode, steps=4, precision="bf16", options={"device_memory": budget})
        for mode in ("2d", "1d")
        for budget in budgets
    ]
    for results in run_ranks(2, train_all, runs, timeout_seconds=300):
        for tight, ample in (results[:2], results[2:]):
            assert tight["report"]["device_peak_bytes"] < ample["report"]["device_peak_bytes"]
            assert tight["losses"] == ample["losses"]
            assert_same_bits(tight["state"], ample["state"])


@pytest.mark.slow
def test_checkpoints_move_between_meshes(tmp_path):
    meshes = [(1, 2), (2, 1), (1, 2, "1d"), (1, 1)]
    saved = run_ranks(2, checkpointed, str(tmp_path), ALL_LLAMA, *meshes[0])
    for mesh in meshes:
        for found in run_ranks(mesh[0] * mesh[1], checkpointed, str(tmp_path), ALL_LLAMA, *mesh):
            assert_same_bits(found["half_way"], saved[0]["half_way"])
            assert relative_error(found["state"], saved[0]["state"]) <= 1e-6

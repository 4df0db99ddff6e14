import dataclasses

import peft

from tests import text_models
from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.ranks.on_mesh import MeshRun, train_all, train_plainly
from tests.ranks.sharded import Model
from tests.ranks.test_tensor_parallel import assert_alike, assert_close


@dataclasses.dataclass(frozen=True)
class Classifier(Model):
    lora: bool = False

    def build(self):
        model = text_models.build(self.name)
        model.config.pad_token_id = 1
        return peft.get_peft_model(model, peft.LoraConfig(r=3, task_type="SEQ_CLS")) if self.lora else model


@dataclasses.dataclass(frozen=True)
class Classifying(MeshRun):
    def batches(self):
        return [{**one, "labels": labels_of(self.model.name, one["input_ids"])} for one in super().batches()]


def labels_of(name, tokens):
    labels = tokens % 2 if "Token" in name else tokens[:, 0] % 2
    return labels.masked_fill(tokens % 5 == 0, -100) if "Token" in name else labels


def test_families_and_classifiers():
    mixtral, tight = Model("MixtralForCausalLM"), {"device_memory": 420_000}
    runs = [
        MeshRun(mixtral, 1, 2, checkpointing=False),
        MeshRun(mixtral, 1, 2, checkpointing=False, options=tight),
        MeshRun(mixtral, 1, 2, "1d", kind="right", checkpointing=True),
        MeshRun(Model("MistralForCausalLM"), 1, 2, "1d", kind="packed"),
        MeshRun(Model("Gemma3ForCausalLM"), 1, 2, "1d", kind="left", checkpointing=True),
        MeshRun(Model("Phi3ForCausalLM"), 2, 1, options={"activations": {"tile_tokens": 8}}),
        Classifying(Classifier("Qwen3ForSequenceClassification"), 1, 2, "1d"),
        Classifying(Classifier("LlamaForSequenceClassification", lora=True), 2, 1),
        Classifying(Classifier("RobertaForSequenceClassification", lora=True), 1, 2),
        Classifying(Classifier("BertForTokenClassification"), 2, 1),
    ]
    runs = [dataclasses.replace(run, steps=3) for run in runs]
    by_rank = run_ranks(2, train_all, runs, timeout_seconds=300)
    for index, run in enumerate(runs):
        found = [results[index] for results in by_rank]
        assert_alike(found)
        assert_close(found[0], train_plainly(run))
    ample, within = by_rank[0][:2]
    assert_same_bits(within["state"], ample["state"])
    assert within["report"]["device_peak_bytes"] < ample["report"]["device_peak_bytes"] / 2

import dataclasses

import pytest
from transformers import BertConfig, LlamaConfig

from patrickstar.config import LossComputation, parse_config
from patrickstar.module.tiled_modules import PROPOSED_TILE_TOKENS
from patrickstar.planning.activation_proposals import fewer_activations, fused_loss, host_memory_for_activations, tiles
from patrickstar.planning.advice import advise, rescue
from patrickstar.planning.planner import Planner
from patrickstar.planning.question import Workload
from patrickstar.planning.setting import DoesNotFitError
from tests.plan.test_advice import ask


@pytest.fixture(scope="module")
def planner():
    return Planner()


def save(folder, config, architecture):
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    def made(layers, intermediate):
        config = LlamaConfig(
            vocab_size=16000, hidden_size=256, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=65536,
        )  # fmt: skip
        return save(tmp_path_factory.mktemp("llama"), config, "LlamaForCausalLM")

    return made


def advised(planner, question):
    with pytest.raises(DoesNotFitError) as refused:
        planner.answer(question)
    return {advice.proposal.kind: advice for advice in rescue(planner, question, refused.value)}


def test_what_does_not_fit_is_answered_with_the_least_that_does(planner, llama):
    work = Workload(model=llama(4, 4096), batch=1, length=32768, checkpointing=True)
    for device_mib, flags, section in (
        (2000, ("--fused-loss",), {"loss": "fused"}),
        (1400, ("--fused-loss", "--tile-tokens", "4096"), {"loss": "fused", "tile_tokens": PROPOSED_TILE_TOKENS}),
    ):
        advice = advised(planner, ask(device_mib, 4096, work))["activations"]
        assert advice.proposal.flags == flags
        assert planner.refusal(advice.proposal.question) is None
        config = advice.answer.config()
        assert config["activations"] == section
        parsed = parse_config(config).activations
        assert parsed.loss is LossComputation.FUSED and parsed.tile_tokens == section.get("tile_tokens", 0)


def test_layers_that_are_not_checkpointed_are_where_tiles_need_it(llama):
    work = Workload(model=llama(4, 4096), batch=2, length=8192)
    flags = [proposal.flags for proposal in fewer_activations(ask(600, 4096, work))]
    fused, tiled = ("--fused-loss",), ("--tile-tokens", "4096")
    assert flags == [fused, ("--checkpointing", *fused), ("--checkpointing", *fused, *tiled)]


def test_what_does_not_apply_is_not_proposed(llama, tmp_path):
    bert = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
    masked = Workload(model=save(tmp_path, bert, "BertForMaskedLM"), batch=64, length=512, checkpointing=True)
    assert fused_loss(ask(600, 4096, masked)) is None  # another loss than that of a causal language model

    work = Workload(model=llama(4, 4096), batch=1, length=8192, checkpointing=True)
    question = ask(600, 4096, work)
    assert fused_loss(question) is not None and tiles(question) is not None
    for changes in ({"length": 8191}, {"sequence_ranks": 2}, {"checkpointing": False}, {"tile_tokens": 2048}):
        assert tiles(ask(600, 4096, dataclasses.replace(work, **changes))) is None
    assert fused_loss(ask(600, 4096, dataclasses.replace(work, loss=LossComputation.FUSED))) is None


@pytest.mark.slow
def test_a_step_that_the_loss_without_logits_makes_shorter(planner):
    work = Workload(model="gpt:512x8", batch=16, length=128, checkpointing=True)
    answer = planner.answer(ask(1380, 4096, work))
    found = {advice.proposal.kind: advice for advice in advise(planner, answer)}
    assert found["activations"].proposal.flags == ("--fused-loss",)
    assert found["checkpointing"].proposal.flags == ("--no-checkpointing", "--fused-loss")
    for kind in ("activations", "checkpointing"):
        assert found[kind].answer.question.workload.loss is LossComputation.FUSED
        assert found[kind].answer.chosen.step.seconds < answer.chosen.step.seconds


@pytest.mark.slow
def test_host_memory_in_which_activations_find_room(planner, llama):
    work = Workload(
        model=llama(16, 1024), batch=1, length=32768, checkpointing=True, loss=LossComputation.FUSED, tile_tokens=4096
    )
    question = ask(1300, 420, work)
    answer = planner.answer(question)
    found = {advice.proposal.kind: advice for advice in advise(planner, answer)}
    more = found["host memory"].answer
    assert more.question.setting.host_bytes > question.setting.host_bytes
    assert more.chosen.stashed_bytes > answer.chosen.stashed_bytes
    ample = ask(1300, 4096, work)
    assert list(host_memory_for_activations(planner, ample, planner.answer(ample).chosen)) == []
    beside = dataclasses.replace(question, workload=dataclasses.replace(work, checkpointing=False, tile_tokens=0))
    assert list(host_memory_for_activations(planner, beside, None)) == []  # what layers keep stays on the device

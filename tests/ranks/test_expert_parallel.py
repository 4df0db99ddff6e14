import copy

import pytest
import torch
import transformers

from patrickstar.experts.exchanged import find_experts
from patrickstar.module.fused_experts import is_experts
from patrickstar.parallel.expert_proof import prove_experts
from patrickstar.runtime import initialize_engine
from tests.bits import assert_same_bits
from tests.distributed import rank_outcomes, run_ranks
from tests.ranks.expert_parallel import (
    FAMILY,
    PARALLEL,
    call_once_more,
    save_and_load,
    start_again,
    start_from_meta,
    start_from_other_values,
    train_compiled,
    train_each,
)
from tests.ranks.mixed_models import MIXTURES, batch, build
from tests.ranks.test_mixed_batches import check
from tests.ranks.test_training import relative_error
from tests.training import make_config

DIVISIBLE = [family for family in MIXTURES if family != "Llama4Text"]  # its experts are not those of the registry


def test_experts_on_two_of_four_ranks():
    check([FAMILY, "GptOss", "DeepseekV3"], 4, 1, True, settings=PARALLEL)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "size", "accumulate"), [(2, 2, 2), (4, 2, 1), (4, 4, 2)])
def test_all_families(num_ranks, size, accumulate):
    families = [*DIVISIBLE, "Qwen3VLMoe", "Qwen3_5Moe"]
    check(families, num_ranks, accumulate, True, settings={"expert_parallel": {"size": size}})


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_budgets_change_no_bit_and_experts_follow_the_mean_of_all_ranks(precision):
    first, second = run_ranks(2, train_each, precision, timeout_seconds=300)
    for found in (first, second):
        for name in ("scarce", "on_host"):
            assert found[name]["steps"] == found["divided"]["steps"]
            assert_same_bits(found[name]["state"], found["divided"]["state"])
        assert found["scarce"]["report"]["num_evictions"] > 0
        assert_same_bits(found["divided"]["state"], first["divided"]["state"])
        close = 1e-5 if precision == "fp32" else 0.02
        for (losses, norm), (shared, shared_norm) in zip(
            found["divided"]["steps"], found["shared"]["steps"], strict=True
        ):
            assert losses == pytest.approx(shared, rel=close)
            assert norm == pytest.approx(shared_norm, rel=close)
        assert relative_error(found["divided"]["state"], found["shared"]["state"]) < close


def test_checkpoints_and_state_dicts_have_whole_tensors(tmp_path):
    first, second = run_ranks(2, save_and_load, tmp_path, timeout_seconds=300)
    name = first["name"]
    experts, rows, width = first["saved"][name].shape
    assert first["shape"] == second["shape"] == (experts // 2, rows, width)
    for found in (first, second):
        assert_same_bits(found["saved"], first["saved"])
        assert_same_bits(found["restored"], found["saved"])
        assert found["master"].equal(found["saved"][name])
        assert found["moment"].shape == found["gradient"].shape == found["saved"][name].shape
        assert_same_bits(found["closed"], found["end"])
        assert found["loss_after"] == first["loss_after"]
    assert torch.cat([first["own_gradient"], second["own_gradient"]]).equal(first["gradient"])
    alone = save_and_load(tmp_path)
    assert_same_bits(alone["loaded"], first["saved"])
    loaded = transformers.Qwen3MoeForCausalLM.from_pretrained(first["folder"], dtype=torch.float32)
    assert_same_bits(dict(loaded.state_dict()), first["saved"])


def test_models_on_the_meta_device_begin_alike():
    for found in run_ranks(2, start_from_meta):
        assert_same_bits(found["divided"], found["shared"])


def test_a_start_that_fails_leaves_the_model_whole():
    found = run_ranks(2, start_again)
    assert "MemoryBudgetError" in [said for said, *_ in found]  # the other rank may learn of it first
    assert [rest for _, *rest in found] == [[{"eager"}, True]] * 2


def test_the_first_ranks_values_count():
    torch.manual_seed(0)
    expected = dict(build(FAMILY)().state_dict())
    for state in run_ranks(2, start_from_other_values):
        assert_same_bits(dict(state), expected)


def test_compiled_blocks_compute_the_same():
    compiled, plain = run_ranks(2, train_compiled), run_ranks(2, train_each, "fp32", "300KiB", ("divided",))
    for (losses, norm), (wanted, wanted_norm) in zip(compiled[1], plain[1]["divided"]["steps"][:2], strict=True):
        assert losses == pytest.approx(wanted, rel=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-6)


def test_a_rank_in_another_call_is_named():
    outcomes = rank_outcomes(2, call_once_more, timeout_seconds=60)
    assert all(outcome.returncode == 1 for outcome in outcomes)
    assert any("RankMismatch" in outcome.error for outcome in outcomes)


def test_models_without_such_experts_are_refused():
    with pytest.raises(ValueError, match=r"size is 2, but Llama4ForCausalLM has no experts that transformers computes"):
        find_experts(build("Llama4Text")(), 2)
    with pytest.raises(ValueError, match=r"size is 3, which does not divide the 4 experts of model\.layers\.0\.mlp"):
        find_experts(build(FAMILY)(), 3)


def test_experts_with_adapters_are_refused():
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    model = peft.get_peft_model(build(FAMILY)(), config)
    with pytest.raises(ValueError, match=r"mlp\.experts\S* has adapters.*target_parameters"):
        find_experts(model, 2)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    assert find_experts(peft.get_peft_model(build(FAMILY)(), config), 2)


def test_settings_that_do_not_go_together_are_refused():
    for more, message in (
        ({"sequence_parallel": {"size": 2}}, "2 ranks share each sample"),
        ({"expert_parallel": {"size": 2, "autoep_size": 4}}, "autoep_size is 4; give one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            initialize_engine(build(FAMILY), 0, make_config("fp32", **{**PARALLEL, **more}))
    with pytest.raises(ValueError, match="1 ranks cannot be divided into groups of 2"):
        initialize_engine(build(FAMILY), 0, make_config("fp32", **PARALLEL))


def test_every_kind_of_experts_is_proven():
    for family in ("Qwen3Moe", "GptOss", "DeepseekV3", "Jamba"):
        model = build(family)()
        before = copy.deepcopy(model.state_dict())
        prove_experts(model, 4)
        assert_same_bits(dict(model.state_dict()), dict(before))
        assert batch(family, 0, True, False)["input_ids"].shape == (2, 12)


def test_experts_that_read_all_weights_are_refused():
    model = build(FAMILY)()
    kind = type(next(module for module in model.modules() if is_experts(module)))

    class Scaled(kind):
        def forward(self, hidden_states, *routing):
            return super().forward(hidden_states, *routing) * self.down_proj.square().sum()

    for module in model.modules():
        if type(module) is kind:
            module.__class__ = Scaled
    with pytest.raises(ValueError, match=r"experts \(Scaled\) computes something else once ranks divide it"):
        prove_experts(model, 2)

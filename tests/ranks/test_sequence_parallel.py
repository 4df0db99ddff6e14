import pytest
import torch

from patrickstar.activations.activation_rules import Saved
from tests.bits import assert_same_bits
from tests.distributed import free_port, run_ranks
from tests.nodes import num_nodes, two_nodes
from tests.ranks.sharded import (
    LENGTH,
    Model,
    Run,
    checkpointed,
    go_wrong,
    train_all,
    train_own,
    two_entry_points,
)
from tests.ranks.test_training import relative_error

GPT2, BERT, LLAMA, QWEN2 = Model("gpt2"), Model("bert"), Model("llama"), Model("qwen2")
MISTRAL = Model("mistral", {"sliding_window": 7})
ROBERTA, STABLELM, BART = Model("RobertaForMaskedLM"), Model("StableLmForCausalLM"), Model("BartForCausalLM")
"""Models whose positions follow from tokens, whose layers pass nothing on, or whose positions cannot be given."""
GPT_OSS = Model("GptOssForCausalLM")
GEMMA2 = Model("gemma2", {"attn_logit_softcapping": 0.05, "head_dim": 8, "sliding_window": 7})
"""Sinks, and a soft cap that these small scores reach; both have layers with a window."""
QWEN3_NEXT, QWEN3_5 = Model("Qwen3NextForCausalLM"), Model("Qwen3_5ForCausalLM")
NEMOTRON_H, GRANITE = Model("NemotronHForCausalLM"), Model("GraniteMoeHybridForCausalLM")
"""The gated delta rule, and Mamba-2, with convolutions; all have layers with attention too."""


def sharded(num_ranks, runs):
    by_rank = run_ranks(num_ranks, train_all, runs, timeout_seconds=300)
    return [[results[index] for results in by_rank] for index in range(len(runs))]


def assert_close(found, expected):
    for name, tolerance in (("losses", 1e-6), ("norms", 1e-6), ("logits", 1e-5)):
        one, other = (torch.as_tensor(run[name], dtype=torch.float64) for run in (found, expected))
        assert ((one - other).norm() / other.norm()).item() <= tolerance, name
    assert relative_error(found["state"], expected["state"]) <= 1e-5


ONE = [
    Run(GPT2),
    Run(BERT),
    Run(LLAMA),
    Run(QWEN2),
    Run(MISTRAL),
    Run(LLAMA, "left"),
    Run(GPT2, "right"),
    Run(BERT, "right"),
    Run(LLAMA, "packed"),
    Run(LLAMA, "no labels for some"),
    Run(LLAMA, length=LENGTH - 5),
    Run(QWEN2, checkpointing=False),
    Run(GPT2, checkpointing=True),
    Run(ROBERTA, "left"),
    Run(STABLELM, checkpointing=False),
    Run(STABLELM, "packed", checkpointing=True),
    Run(BART, length=LENGTH - 5),
    Run(GPT_OSS, "left"),
    Run(GEMMA2, "packed", checkpointing=False),
    Run(QWEN3_NEXT, "left", checkpointing=False),
    Run(QWEN3_5, "packed"),
    Run(NEMOTRON_H, "right", length=LENGTH - 5),
    Run(GRANITE, checkpointing=True),
]


@pytest.fixture(scope="module")
def alone():
    return train_all(ONE)


def shared(size, **options):
    modes = ["auto", "auto", "zigzag", "ring", "zigzag", "ring", "zigzag", "ring", "ring", "auto", "zigzag", "zigzag"]
    modes += ["rsa", "zigzag", "ring", "zigzag", "zigzag", "zigzag", "ring", "zigzag", "auto", "zigzag", "ring"]
    return [Run(**{**vars(run), "size": size, "mode": mode, **options}) for run, mode in zip(ONE, modes, strict=True)]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_models_are_those_of_one_process(size, alone):
    for run, found, expected in zip(ONE, sharded(size, shared(size)), alone, strict=True):
        print(run.model.name, run.kind, found[0]["losses"][-1], expected["losses"][-1])
        for rank in found:
            assert rank["losses"] == found[0]["losses"]
            assert_same_bits(rank["state"], found[0]["state"])
        assert_close(found[0], expected)


@pytest.mark.slow
def test_four_ranks_and_two_of_two(alone):
    llama = Run(LLAMA, "left", mode="ring")
    runs = [
        Run(**{**vars(llama), "size": 4}),
        Run(**{**vars(llama), "size": 4, "mode": "ulysses"}),
        Run(**{**vars(llama), "size": 4, "mode": "hybrid", "options": {}}),
        Run(**{**vars(llama), "size": 2}),
        Run(**{**vars(llama), "size": 2, "mode": "ulysses", "accumulate": 2}),
    ]
    four = sharded(4, runs)
    for found in four[:3]:
        assert_close(found[0], alone[ONE.index(Run(LLAMA, "left"))])
    by_data = sharded(2, [Run(LLAMA, "left"), Run(LLAMA, "left", accumulate=2)])
    for found, expected in zip(four[3:], by_data, strict=True):
        assert_close(found[0], expected[0])
        assert_close(found[2], expected[1])


def test_hybrid_on_two_nodes(alone):
    """Two ranks on each node: heads are divided within a node, keys travel between nodes."""
    expected = [Run(LLAMA, "left"), Run(GPT_OSS, "left"), Run(QWEN3_NEXT, "left", checkpointing=False)]
    runs = [Run(**{**vars(run), "size": 4, "mode": "hybrid"}) for run in expected]
    with two_nodes() as nodes:
        print(f"nodes {nodes}")
        common = {"MASTER_PORT": str(free_port()), "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}
        of_ranks = [nodes[0], nodes[0], nodes[1], nodes[1]]
        by_rank = run_ranks(4, train_all, runs, nodes=of_ranks, environment=lambda _: common)
    for index, run in enumerate(expected):
        for rank in by_rank:
            assert rank[index]["neighbours"] == 4 // num_nodes(nodes)
            assert rank[index]["losses"] == by_rank[0][index]["losses"]
            assert_close(rank[index], alone[ONE.index(run)])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_budgets_change_no_bit(precision):
    plain = Run(LLAMA, size=2, mode="zigzag", precision=precision)
    scarce = {"device_memory": "700KB", "default_chunk_size": 4096}
    runs = [plain, Run(**{**vars(plain), "options": scarce})]
    roomy, small = sharded(2, runs)
    assert small[0]["report"]["num_evictions"] > 0
    assert small[0]["report"]["num_replayed_accesses"] > 0
    for rank in range(2):
        assert roomy[rank]["losses"] == small[rank]["losses"]
        assert roomy[rank]["norms"] == small[rank]["norms"]
        assert_same_bits(small[rank]["state"], roomy[rank]["state"])


def test_sinks_and_scans_in_bfloat16_within_any_budget():
    recomputed = {"activations": {"recompute": "always"}}
    for model, budget in ((GPT_OSS, "3MB"), (QWEN3_NEXT, "10400KB")):
        plain = Run(model, "left", size=2, mode="zigzag", precision="bf16", checkpointing=False, options=recomputed)
        scarce = {"device_memory": budget, "default_chunk_size": 4096, **recomputed}
        (expected,) = train_all([Run(**{**vars(plain), "size": 1})])
        roomy, small = sharded(2, [plain, Run(**{**vars(plain), "options": scarce})])
        assert small[0]["report"]["num_evictions"] > 0
        assert roomy[0]["losses"] == small[1]["losses"] == pytest.approx(expected["losses"], rel=5e-4)
        assert roomy[0]["norms"] == small[1]["norms"] == pytest.approx(expected["norms"], rel=5e-3)
        assert_same_bits(small[1]["state"], roomy[0]["state"])


def test_dropout_in_attention_is_that_of_any_number_of_ranks():
    model = Model("gpt2", {"attn_pdrop": 0.3})
    by_size = [sharded(size, [Run(model, size=size, mode="ring", checkpointing=False)])[0][0] for size in (2, 3)]
    assert_close(*by_size)
    saved = (Saved.EVERYTHING, Saved.PRODUCTS_ON_HOST, Saved.PRODUCTS)
    chosen = Run(model, size=2, mode="ring", checkpointing=False, saved=saved, options={"device_memory": "2MB"})
    plain, kept = sharded(2, [Run(GPT2, size=2, mode="ring"), chosen])
    assert plain[0]["losses"] != by_size[0]["losses"]
    assert kept[0]["losses"] == by_size[0]["losses"]  # wherever activations of layers rest
    assert kept[0]["report"]["offloaded_bytes"] > 0
    assert_same_bits(kept[0]["state"], by_size[0]["state"])


def test_loss_and_modules_in_tiles(alone):
    options = {"activations": {"loss": "fused", "tile_tokens": 7}}
    expected = [Run(LLAMA, "left"), Run(LLAMA, "no labels for some"), Run(QWEN2, checkpointing=False)]
    modes = ["zigzag", "ring", "ulysses"]
    runs = [
        Run(**{**vars(run), "size": 2, "mode": mode, "options": options})
        for run, mode in zip(expected, modes, strict=True)
    ]
    for run, found in zip(expected, sharded(2, runs), strict=True):
        assert_same_bits(found[1]["state"], found[0]["state"])
        assert_close(found[0], alone[ONE.index(run)])


def test_a_module_with_attention_of_its_own():
    (alone,) = run_ranks(1, train_own, 1)
    for size in (2, 3):
        for found in run_ranks(size, train_own, size):
            assert found["norms"] == pytest.approx(alone["norms"], rel=1e-5)
            for name, value in alone["state"].items():
                assert (found["state"][name] - value).abs().max().item() < 1e-5


def test_checkpoints_move_between_numbers_of_ranks(tmp_path):
    saved = run_ranks(2, checkpointed, str(tmp_path), 2)
    for size in (1, 2, 4):
        for found in run_ranks(size, checkpointed, str(tmp_path), size):
            assert found["losses"] == pytest.approx(saved[0]["losses"], rel=1e-6)
            assert relative_error(found["state"], saved[0]["state"]) <= 1e-5
            if size == 2:
                assert_same_bits(found["state"], saved[0]["state"])


def test_what_cannot_be_sharded_is_refused():
    expected = [
        "a mesh of data 1 x sequence 3 has 3 ranks, but the run has 2",
        "a mesh of data 1 x sequence 4 has 4 ranks, but the run has 2",
        "T5ForConditionalGeneration",
        "Wrapped has parameters beside those of its LlamaForCausalLM",
        "3 heads cannot be divided among 2 ranks",
        "share sequences, but were called with different batches",
        "with tokens that sum to",
        "attention_mask is [2, 1, 4, 4]; with sequence_parallel give [batch, tokens]",
        "LlamaForSequenceClassification computes nothing for each token",
    ]
    for messages in run_ranks(2, go_wrong):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def test_deepspeeds_names():
    (first, by_mesh), second = run_ranks(2, two_entry_points)
    assert first == by_mesh == second[0] == second[1]
    assert len(first) == 4

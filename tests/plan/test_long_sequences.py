import json
import time

import pytest
import torch

from patrickstar.integrations.fused_loss import fuse_loss
from patrickstar.module.preprocess import plan_params
from patrickstar.plan import main
from patrickstar.planning.machines import H200
from patrickstar.planning.models import SharedSequences, build_model
from patrickstar.planning.uses import trace_uses
from patrickstar.sequence.choice import Links
from tests.models import llama_config
from tests.text_models import tiny_config

BF16 = ["--host-memory", "4GiB", "--device-memory", "256MiB", "--no-advice"]
GPT = ["--model", "gpt:128x4", "--no-checkpointing", "--host-memory", "4GiB", "--device-memory", "2GiB", "--no-advice"]
LAYERS, HIDDEN, WIDE, VOCAB = 2, 64, 128, 1000


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    llama_config(HIDDEN, LAYERS, intermediate=WIDE, vocab=VOCAB, length=4096).save_pretrained(path)
    return str(path)


def run(capsys, *args, expect=0):
    assert main([*args]) == expect
    return capsys.readouterr()


def as_json(capsys, *args, expect=0):
    return json.loads(run(capsys, *args, "--json", expect=expect).out)


def trace(llama, length, size=1, prepare=fuse_loss, links=None):
    shared = SharedSequences(size=size, links=links or Links())
    model = build_model(llama, 1, length, checkpointing=True, prepare=prepare, shared=shared)
    params = plan_params(model.module, torch.bfloat16, use_cpu_embedding=False)
    uses = trace_uses(model.module, params, torch.bfloat16, model.inputs, H200.gpu, divisions=model.divisions)
    return uses, model.division


def activation_memory(uses):
    return max(use.activation_peak_bytes for use in uses.uses)


def test_a_share_of_the_tokens_and_no_more(capsys):
    one = as_json(capsys, *GPT, "--batch-size", "2", "--seq-len", "512", "--gpus-per-node", "2")
    two = as_json(capsys, *GPT, "--batch-size", "2", "--seq-len", "1024", "--gpus-per-node", "2",
                  "--sequence-parallel", "2")  # fmt: skip
    assert two["activation_peak_bytes"] == pytest.approx(one["activation_peak_bytes"], rel=0.05)
    assert two["host_bytes"] == pytest.approx(one["host_bytes"], rel=0.01)
    assert two["config"]["sequence_parallel"] == {"size": 2, "mode": two["attention"]["mode"]}
    assert one["attention"] is None and "sequence_parallel" not in one["config"]
    assert two["tokens_per_second"] * two["step_seconds"] == pytest.approx(2 * 1024)
    assert one["tokens_per_second"] * one["step_seconds"] == pytest.approx(2 * 512 * 2)
    # Half of the operations of all 2 x 1024 tokens.
    alone = as_json(capsys, *GPT, "--batch-size", "2", "--seq-len", "1024")
    assert two["model_tflops"] * two["step_seconds"] == pytest.approx(
        alone["model_tflops"] * alone["step_seconds"] / 2, rel=0.01
    )


def test_it_says_which_mode_and_why(capsys):
    asked = [*GPT, "--batch-size", "1", "--seq-len", "1024", "--gpus-per-node", "4", "--sequence-parallel", "4"]
    out = run(capsys, *asked, "--verbose").out
    assert "4 GPUs share each sequence, mode " in out
    assert " ms a layer" in out and "of which GPUs wait" in out
    llama_heads = ["--nodes", "3", "--sequence-parallel", "3"]
    assert "16 heads cannot be divided among 3 ranks" in run(capsys, *asked[:-4], *llama_heads, "--verbose").out


def test_exposed_transfers_take_their_time(llama):
    slow = Links(gbps=0.01)
    fast, _ = trace(llama, 4096, 2, links=Links(gbps=1e6, latency_seconds=0.0))
    found, division = trace(llama, 4096, 2, links=slow)
    choice = division.choice
    assert choice.exposed_seconds > 0
    expected = LAYERS * (2 * choice.forward.exposed_seconds + choice.backward.exposed_seconds)
    seconds = [sum(use.seconds for use in uses.uses) for uses in (found, fast)]
    assert seconds[0] - seconds[1] == pytest.approx(expected, rel=0.01)
    assert found.flops == fast.flops
    alone, _ = trace(llama, 4096)
    assert found.flops == pytest.approx(alone.flops / 2, rel=0.01)


@pytest.mark.parametrize("size", [1, 4])
def test_activations_grow_with_the_tokens(llama, size):
    """Equal steps up to two million tokens for each rank: no bytes for pairs of tokens."""
    begin = time.perf_counter()
    lengths = [2**19, 2**20, 2**21]
    first, second, third = (activation_memory(trace(llama, size * length, size)[0]) for length in lengths)
    assert time.perf_counter() - begin < 15
    assert third - second == pytest.approx(2 * (second - first), rel=0.01)
    each = (third - second) / 2**20
    print(f"{each:.0f} bytes per token")
    assert LAYERS * HIDDEN * 2 < each < (LAYERS * HIDDEN + 12 * WIDE + 24 * HIDDEN) * 2
    whole, _ = trace(llama, size * 2**19, size, prepare=None)
    assert activation_memory(whole) - first > 2**19 * VOCAB * 4


def test_the_longest_that_fits(capsys, llama):
    asked = ["--model", llama, "--no-checkpointing", *BF16, "--checkpointing", "--fused-loss", "--chunk-numel", "65536"]
    two = ["--gpus-per-node", "2", "--sequence-parallel", "2"]
    found = as_json(capsys, *asked, *two, "--longest")
    one, shared = found["longest"]
    assert (one["sequence_parallel"], shared["sequence_parallel"]) == (1, 2)
    assert found["batch_size"] == 1 and found["seq_len"] == shared["seq_len"]
    assert set(found["saved_by_calls"]) <= {"nothing"}  # which makes it the longest
    assert shared["seq_len"] == pytest.approx(2 * one["seq_len"], rel=0.05)
    for flags, length in ((two[:2], one["seq_len"]), (two, shared["seq_len"])):
        assert length % 1024 == 0
        flags = [*flags, "--batch-size", "1", "--seq-len"]
        assert as_json(capsys, *asked, *flags, str(length))["fits"]
        assert not as_json(capsys, *asked, *flags, str(length + 1024), expect=1)["fits"]
    out = run(capsys, *asked, *two, "--longest", "--verbose").out
    assert "longest sequences that fit:" in out
    assert f"{shared['seq_len']:,}" in out
    assert "more than the 4096 positions" in out


def test_positions_in_a_table_are_a_limit(capsys):
    found = as_json(capsys, "--model", "gpt2", "--longest", "--host-memory", "8GiB", "--no-advice")
    assert found["seq_len"] == 1024
    assert set(found["saved_by_calls"]) == {"everything"}  # this length leaves room
    assert "has 1024 positions" in run(capsys, "--model", "gpt2", "--seq-len", "2048", expect=2).err


def test_sharing_sequences_is_advice_where_activations_do_not_fit(capsys):
    asked = [*GPT[:-1], "--seq-len", "2048", "--batch-size", "1", "--checkpointing", "--gpus-per-node", "4"]
    out = run(capsys, *asked, "--device-memory", "700MiB", expect=1).out
    assert "share each sequence" in out and "--sequence-parallel" in out


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--sequence-parallel", "2"], "--sequence-parallel is 2, but there are 1 GPUs"),
        (["--sequence-parallel", "3", "--gpus-per-node", "4"], "not groups of 3; give --gpus-per-node 3"),
        (["--longest", "--seq-len", "64"], "--longest finds the length"),
    ],
)
def test_bad_input_is_named(capsys, args, match):
    assert match in run(capsys, *GPT, *args, expect=2).err


def test_models_that_cannot_be_sharded_are_named(capsys, tmp_path):
    from transformers import BertConfig, BloomConfig, GptOssConfig, InklingForCausalLM

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"vocab_size": 1000}
    asked = [*BF16, "--seq-len", "128", "--batch-size", "1", "--gpus-per-node", "2", "--sequence-parallel", "2"]
    BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=1000).save_pretrained(tmp_path / "bloom")
    assert "BloomForCausalLM" in run(capsys, "--model", str(tmp_path / "bloom"), *asked, expect=2).err
    tiny_config(InklingForCausalLM.config_class).save_pretrained(tmp_path / "inkling")
    assert "asks for position_bias" in run(capsys, "--model", str(tmp_path / "inkling"), *asked, expect=2).err
    GptOssConfig(**small, num_key_value_heads=2, head_dim=16, num_local_experts=4).save_pretrained(tmp_path / "sinks")
    assert as_json(capsys, "--model", str(tmp_path / "sinks"), *asked)["attention"]["mode"] in ("zigzag", "ulysses")
    BertConfig(**small, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path / "bert")
    assert as_json(capsys, "--model", str(tmp_path / "bert"), *asked)["attention"]["mode"] in ("ring", "ulysses")

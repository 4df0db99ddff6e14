import contextlib
import json

import pytest
import torch

from patrickstar import _C
from patrickstar.config import MatrixMode, parse_config
from patrickstar.module.preprocess import plan_params
from patrickstar.module.tiled_modules import tile_modules
from patrickstar.plan import main
from patrickstar.planning import uses
from patrickstar.planning.cluster import LINKS, Cluster, LineRates
from patrickstar.planning.machines import H200
from patrickstar.planning.models import SharedSequences, build_model
from patrickstar.planning.sharded_matrices import MatrixMesh, SharedMatrices
from patrickstar.planning.uses import trace_uses
from patrickstar.sequence.choice import Links
from patrickstar.tensor2d import MeshPlace, cost
from patrickstar.tensor2d.cost import LayerShape, Mode
from tests.models import llama_config

HIDDEN, LAYERS, VOCAB, BATCH, LENGTH = 256, 3, 50304, 8, 128
NAME = f"gpt:{HIDDEN}x{LAYERS}"
GPT = ["--model", NAME, "--batch-size", "8", "--seq-len", "128", "--host-memory", "4GiB", "--device-memory", "2GiB"]
GPT += ["--gpus-per-node", "4"]
MESHES = [(1, 2), (2, 1), (2, 2), (2, 4)]


def run(capsys, *args, expect=0):
    assert main([*args]) == expect
    return capsys.readouterr()


def as_json(capsys, *args, expect=0):
    return json.loads(run(capsys, *args, "--no-advice", "--json", expect=expect).out)


def trace(
    rows, columns, mode=Mode.TWO, gbps=1e9, latency=0.0, checkpointing=False, name=NAME, length=LENGTH, **options
):
    rates = LineRates(gbps, gbps, latency)
    shared = SharedMatrices(
        mesh=MatrixMesh(mode=mode, rows=rows, columns=columns), along_columns=rates, along_rows=rates
    )
    model = build_model(name, BATCH, length, checkpointing=checkpointing, matrices=shared, **options)
    params = plan_params(model.module, torch.bfloat16, use_cpu_embedding=False)
    uses = trace_uses(model.module, params, torch.bfloat16, model.inputs, H200.gpu, divisions=model.divisions)
    return uses, model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    sizes = {"heads": 8, "kv_heads": 4, "intermediate": 16 * HIDDEN}
    llama_config(HIDDEN, LAYERS, **sizes, vocab=512, length=4096).save_pretrained(path)
    return str(path)


def of_products(received):
    return received["panels"] + received["partial sums"]


@pytest.mark.parametrize(("rows", "columns"), MESHES)
def test_a_trace_receives_what_is_counted(rows, columns):
    tokens = BATCH * LENGTH
    expected = cost.embedding(tokens, HIDDEN, rows, columns)
    expected += cost.head(tokens, HIDDEN, VOCAB, MeshPlace(rows, columns), tied=False)
    for _ in range(LAYERS):
        expected += cost.received_2d(LayerShape(hidden=HIDDEN), tokens, rows, columns)
    assert of_products(trace(rows, columns)[1].matrices.received_bytes) == 2 * expected.total


def test_a_trace_in_one_dimension_receives_what_is_counted():
    tokens, ranks = BATCH * LENGTH, 4
    part = (ranks - 1) / ranks * tokens * HIDDEN
    expected = LAYERS * cost.received_1d(LayerShape(hidden=HIDDEN), tokens, ranks).total + 5 * part
    _, model = trace(1, ranks, Mode.ONE)
    assert of_products(model.matrices.received_bytes) == 2 * expected  # of embedding and head 2 forward, 3 backward


@pytest.mark.parametrize(("mode", "rows", "columns"), [(Mode.TWO, 2, 2), (Mode.ONE, 1, 4)])
def test_waits_are_what_products_do_not_hide(mode, rows, columns):
    free, model = trace(rows, columns, mode)
    assert model.matrices.exposed_seconds == pytest.approx(0.0, abs=1e-6)
    alone = sum(use.seconds for use in free.uses)
    for gbps in (1e-3, 20.0):
        slow, model = trace(rows, columns, mode, gbps=gbps)
        matrices = model.matrices
        assert sum(use.seconds for use in slow.uses) - alone == pytest.approx(matrices.exposed_seconds, rel=1e-3)
        assert slow.flops == free.flops
        hidden = matrices.link_seconds - matrices.exposed_seconds
        assert 0 < hidden < alone
    assert matrices.exposed_seconds < 0.95 * matrices.link_seconds  # one panel ahead of its product
    late, model = trace(rows, columns, mode, latency=1e-3)
    assert sum(use.seconds for use in late.uses) > alone + LAYERS * 20e-3


def test_a_layer_waits_in_backward_for_its_weights_too():
    uses, model = trace(2, 2)
    names = [name for name, _ in model.module.named_parameters()]
    weights = {index for index, name in enumerate(names) if name.endswith("attn.c_attn.weight")}
    entered = {param for use in uses.uses if use.call == _C.UseCall.ENTER_BACKWARD for param in use.params}
    assert len(weights) == LAYERS and weights <= entered


def test_parameters_and_activations_are_sharded():
    few, many = trace(1, 2), trace(2, 4)
    activation_levels = [max(use.activation_peak_bytes for use in uses.uses) for uses, _ in (few, many)]
    assert activation_levels[1] == pytest.approx(activation_levels[0] / 4, rel=0.05)
    sizes = [sum(param.numel() for param in model.module.parameters()) for _, model in (few, many)]
    assert sizes[1] == pytest.approx(sizes[0] / 4, rel=0.01)
    assert few[1].num_params == many[1].num_params == pytest.approx(2 * sizes[0], rel=0.01)


@pytest.mark.parametrize("links", [Links(gbps=1e-3), Links(attention_tflops=1e-9)], ids=["ulysses", "zigzag"])
def test_sequences_are_sharded_beside_matrices(llama, links):
    alone, short = trace(2, 2, name=llama, length=LENGTH // 2)
    shared, model = trace(2, 2, name=llama, shared=SharedSequences(size=2, links=links))
    assert model.inputs["input_ids"].shape == (BATCH // 2, LENGTH // 2)
    assert of_products(model.matrices.received_bytes) == of_products(short.matrices.received_bytes)
    activation_levels = [max(use.activation_peak_bytes for use in uses.uses) for uses in (alone, shared)]
    assert activation_levels[1] == pytest.approx(activation_levels[0], rel=0.1)
    # A rank has 4 heads, 2 of keys: forward's operations of both layers' attention, as if nothing were masked.
    assert model.division.flops[0] == 4.0 * (BATCH // 2) * 4 * LENGTH**2 * (HIDDEN // 8) / 2


@pytest.mark.parametrize(("mode", "rows", "columns"), [(Mode.TWO, 2, 2), (Mode.ONE, 1, 4)])
def test_a_tile_that_stands_for_others_sends_what_they_would(llama, monkeypatch, mode, rows, columns):
    def tiled(module):
        tile_modules(module, 96)  # of which 512 or 1024 tokens are no multiple

    once, model = trace(rows, columns, mode, gbps=20.0, name=llama, prepare=tiled)
    monkeypatch.setattr(uses, "equal_tiles_once", lambda count: contextlib.nullcontext())
    each, all_tiles = trace(rows, columns, mode, gbps=20.0, name=llama, prepare=tiled)
    assert len(once.uses) <= len(each.uses)
    assert model.matrices.received_bytes == all_tiles.matrices.received_bytes
    assert model.matrices.link_seconds == pytest.approx(all_tiles.matrices.link_seconds)
    assert model.matrices.exposed_seconds == pytest.approx(all_tiles.matrices.exposed_seconds, rel=0.1)


def test_lines_across_nodes_are_as_fast_as_their_adapters():
    cluster = Cluster(nodes=2, gpus_per_node=4, link=LINKS["ib400"])
    inside, outside = cluster.line_rates(H200, 4, 1), cluster.line_rates(H200, 2, 4)
    assert (inside.panels_gbps, inside.sums_gbps) == (H200.nvlink_gather_gbps, H200.nvlink_scatter_gbps)
    assert (outside.panels_gbps, outside.sums_gbps) == (46.0, 46.0)
    both = cluster.line_rates(H200, 8, 1)
    assert (both.panels_gbps, both.sums_gbps) == (184.0, 184.0)
    assert inside.latency_seconds < outside.latency_seconds < both.latency_seconds


def test_chunks_are_shared_by_those_that_have_the_same(capsys):
    one = as_json(capsys, *GPT, "--tensor-parallel", "2x2")
    two = as_json(capsys, *GPT, "--tensor-parallel", "2x2", "--nodes", "2", "--link", "ib400")
    assert two["least_host_bytes"] == pytest.approx(one["least_host_bytes"] / 2, rel=0.1)
    assert one["gathered_bytes"] == 0 < two["gathered_bytes"]
    assert one["tokens_per_second"] * one["step_seconds"] == pytest.approx(BATCH * LENGTH)
    assert two["tokens_per_second"] * two["step_seconds"] == pytest.approx(2 * BATCH * LENGTH)
    assert one["config"]["tensor_parallel"] == {"rows": 2, "columns": 2, "mode": "2d"}
    alone = as_json(capsys, *GPT[:-2])
    assert one["model_tflops"] * one["step_seconds"] * 4 == pytest.approx(alone["model_tflops"] * alone["step_seconds"])
    assert alone["tensor_parallel"] is None and one["num_parameters"] == alone["num_parameters"]


def test_auto_takes_what_receives_least_and_says_why(capsys):
    many = as_json(capsys, *GPT, "--tensor-parallel", "auto")["tensor_parallel"]
    assert (many["mode"], many["rows"], many["columns"]) == ("2d", 2, 2)
    few = as_json(capsys, *GPT, "--tensor-parallel", "auto", "--batch-size", "2")["tensor_parallel"]
    assert few["mode"] == "1d" and "256 tokens are 1 times the hidden size" in few["reason"]
    config = as_json(capsys, *GPT, "--tensor-parallel", "auto", "--batch-size", "2")["config"]
    assert parse_config(config | {"optimizer": {}}).tensor_parallel.mode is MatrixMode.ONE
    assert few["received_bytes"] > 0 and few["link_seconds"] > 0
    out = run(capsys, *GPT, "--tensor-parallel", "4", "--tensor-mode", "1d", "--verbose").out
    assert "4 GPUs share matrices, divided in one dimension: in forward and backward each receives" in out
    assert "so divided since" in out and '"mode": "1d"' in out


def test_what_would_fit_is_planned_on_the_mesh(capsys):
    asked = [*GPT, "--batch-size", "64", "--tensor-parallel", "2x2", "--device-memory", "300MiB", "--chunk-numel"]
    found = json.loads(run(capsys, *asked, "1048576", "--json", expect=1).out)
    batches = [item for item in found["advice"] if "--batch-size" in item["flags"]]
    assert batches and all(int(item["flags"][item["flags"].index("--batch-size") + 1]) % 2 == 0 for item in batches)
    assert not any("--sequence-parallel" in item["flags"] for item in found["advice"])


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--tensor-parallel", "2x4"], "is 2x4, but there are 4 GPUs, which are not groups of 8"),
        (["--tensor-parallel", "4x1", "--batch-size", "6"], "4 rows do not divide a batch of 6; give --batch-size 8"),
        (["--tensor-parallel", "1x4", "--tensor-mode", "1d", "--seq-len", "130"], "130 tokens; give --seq-len 132"),
        (["--tensor-parallel", "2x2", "--tensor-mode", "1d"], "one dimension has no rows; give 4"),
        (["--tensor-mode", "2d"], "--tensor-mode is 2d, but nothing is divided"),
        (["--tensor-parallel", "two"], "is 'two'; give ROWSxCOLUMNS"),
        (["--tensor-parallel", "2x2", "--sequence-parallel", "2"], "take 8 GPUs together, but there are 4"),
        (
            ["--tensor-parallel", "2", "--tensor-mode", "1d", "--sequence-parallel", "2"],
            "give --tensor-mode 2d, or leave out --sequence-parallel",
        ),
        (
            ["--tensor-parallel", "2x2", "--lora-rank", "8"],
            "with --lora-rank, which is planned for whole matrices alone",
        ),
        (["--tensor-parallel", "1x3", "--gpus-per-node", "3"], "heads: 16 cannot be cut into 3 columns"),
        (["--tensor-parallel", "3", "--gpus-per-node", "3"], "cannot be divided among 3 ranks"),
        (
            ["--tensor-parallel", "2x2", "--model", "deepseek-v3"],
            "DeepseekV3ForCausalLM cannot be sharded over a mesh: the linear layers of model.layers.0.self_attn",
        ),
        (["--tensor-parallel", "2x2", "--also", "6"], "not whole nodes of 4"),
    ],
)
def test_bad_input_is_named(capsys, args, match):
    assert match in run(capsys, *GPT, *args, expect=2).err


def test_all_that_engines_do_together_is_planned_together(capsys, llama):
    asked = [
        "--model",
        llama,
        "--no-checkpointing",
        "--batch-size",
        "2",
        "--device-memory",
        "2GiB",
        "--host-memory",
        "4GiB",
    ]
    asked += ["--checkpointing", "--gpus-per-node", "4", "--fused-loss", "--tile-tokens", "64"]
    found = as_json(capsys, *asked, "--seq-len", "512", "--tensor-parallel", "1x2", "--sequence-parallel", "2")
    config = parse_config(found["config"] | {"optimizer": {}})
    assert (config.tensor_parallel.columns, config.sequence_parallel.size, config.activations.tile_tokens) == (2, 2, 64)
    assert found["tokens_per_second"] * found["step_seconds"] == pytest.approx(2 * 512)
    auto = as_json(capsys, *asked, "--seq-len", "512", "--tensor-parallel", "auto", "--sequence-parallel", "2")
    assert auto["tensor_parallel"]["mode"] == "2d" and auto["tensor_parallel"]["received_bytes"] > 0
    assert auto["tensor_parallel"]["rows"] * auto["tensor_parallel"]["columns"] == 2
    bad = run(capsys, *asked, "--longest", "--tensor-parallel", "auto", expect=2).err
    assert "whose mesh follows from the length that --longest looks for; give ROWSxCOLUMNS, or --seq-len" in bad
    asked = [
        *asked,
        "--longest",
        "--tile-tokens",
        "512",
        "--device-memory",
        "96MiB",
        "--tensor-parallel",
        "1x2",
        "--sequence-parallel",
        "2",
    ]
    one, two = as_json(capsys, *asked)["longest"]
    assert 1.3 * one["seq_len"] < two["seq_len"] < 3 * one["seq_len"]

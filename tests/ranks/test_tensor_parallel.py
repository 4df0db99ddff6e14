import dataclasses
import math

import pytest
import torch

from tests.bits import assert_same_bits
from tests.distributed import run_ranks
from tests.ranks.on_mesh import (
    MeshRun,
    by_deepspeeds_names,
    checkpointed,
    from_files,
    go_wrong,
    outgrow,
    run_out,
    train_all,
    train_plainly,
)
from tests.ranks.sharded import Model
from tests.ranks.test_training import relative_error
from tests.training import least_named

GPT2, BERT, LLAMA, QWEN2 = Model("gpt2"), Model("bert"), Model("llama"), Model("qwen2")
SCALE = {"enabled": True, "loss_scale": 0, "initial_scale_power": 20, "hysteresis": 1}
RUNS = [
    MeshRun(GPT2),
    MeshRun(LLAMA),
    MeshRun(QWEN2, kind="left"),
    MeshRun(LLAMA, kind="no labels for some", checkpointing=False),
    MeshRun(GPT2, clip=0.0, checkpointing=True),
]


@pytest.fixture(scope="module")
def plain():
    return [train_plainly(run) for run in RUNS]


def on_mesh(num_ranks, rows, columns, runs, mode="2d"):
    runs = [dataclasses.replace(run, rows=rows, columns=columns, mode=mode) for run in runs]
    by_rank = run_ranks(num_ranks, train_all, runs, timeout_seconds=300)
    return [[results[index] for results in by_rank] for index in range(len(runs))]


def assert_alike(found):
    for rank in found:
        assert rank["norms"] == found[0]["norms"]
        assert_same_bits(rank["state"], found[0]["state"])


def assert_close(found, expected):
    for name, tolerance in (("losses", 1e-6), ("norms", 1e-6), ("logits", 5e-6)):
        one, other = (torch.as_tensor(run[name], dtype=torch.float64) for run in (found, expected))
        assert one.shape == other.shape
        assert ((one - other).norm() / other.norm()).item() <= tolerance, name
    assert list(found["state"]) == list(expected["state"])
    assert relative_error(found["state"], expected["state"]) <= 1e-6


@pytest.mark.parametrize(
    ("mesh", "num_runs"),
    [
        ((1, 2), 3),
        ((2, 1), 2),
        ((1, 2, "1d"), 3),
        *(
            pytest.param(mesh, len(RUNS), marks=pytest.mark.slow)
            for mesh in ((1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (1, 2, "1d"), (1, 4, "1d"))
        ),
    ],
    ids=str,
)
def test_models_are_those_of_plain_pytorch(mesh, num_runs, plain):
    rows, columns, *mode = mesh
    runs = [run for run in RUNS[:num_runs] if columns < 4 or run.model is GPT2]  # of the others, keys have two heads
    for run, found in zip(runs, on_mesh(rows * columns, rows, columns, runs, *mode), strict=True):
        assert_alike(found)
        for rank in found:
            assert rank["losses"] == found[0]["losses"]
        expected = plain[RUNS.index(run)]
        assert_close(found[0], expected)
        assert min(expected["norms"]) > run.clip
        num_elements = sum(param.numel() for param in run.model.build().parameters())
        assert found[0]["num_elements"] < 1.4 * num_elements / (rows * columns)  # rows share biases and norms
        assert found[0]["report"]["num_parameters"] == num_elements


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((1, 2, "1d"), {}),
        *(
            pytest.param(mesh, options, marks=pytest.mark.slow)
            for mesh, options in (
                ((1, 2), {}),
                ((2, 1), {}),
                ((2, 2), {"checkpointing": True}),
                ((1, 4, "1d"), {"checkpointing": False}),
                ((1, 2), {"sequence": 2, "sequence_mode": "ring"}),
            )
        ),
    ],
    ids=str,
)
def test_a_masked_language_model(mesh, options):
    run = MeshRun(BERT, kind="right")
    rows, columns, *mode = mesh
    num_ranks = rows * columns * options.get("sequence", 1)
    (found,) = on_mesh(num_ranks, rows, columns, [dataclasses.replace(run, **options)], *mode)
    assert_alike(found)
    assert_close(found[0], train_plainly(run))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((1, 2), {}),
        *(
            pytest.param(mesh, options, marks=pytest.mark.slow)
            for mesh, options in (((2, 1), {}), ((1, 2, "1d"), {}), ((1, 2), {"sequence": 2, "sequence_mode": "ring"}))
        ),
    ],
    ids=str,
)
def test_modules_in_tiles(mesh, options, plain):
    keys = {"activations": {"loss": "fused", "tile_tokens": 7}, "use_cpu_embedding": True}
    rows, columns, *mode = mesh
    run = dataclasses.replace(RUNS[3], options=keys, **options)
    (found,) = on_mesh(rows * columns * options.get("sequence", 1), rows, columns, [run], *mode)
    assert_alike(found)
    assert_close(found[0], plain[3])
    assert [rank["num_tiled"] for rank in found] == [2] * len(found)  # an MLP in each layer


def beside_sequences(mesh, modes):
    runs = [dataclasses.replace(RUNS[index], sequence=2, sequence_mode=mode) for index, mode in modes.items()]
    for index, found in zip(modes, on_mesh(2 * mesh[0] * mesh[1], *mesh, runs), strict=True):
        assert_alike(found)
        assert [rank["losses"] for rank in found] == [found[0]["losses"]] * len(found)
        yield RUNS[index], found


@pytest.mark.parametrize(
    ("mesh", "modes"),
    [
        ((1, 2), {1: "ring"}),
        pytest.param((1, 2), {0: "ulysses", 1: "auto", 2: "zigzag", 3: "ring", 4: "auto"}, marks=pytest.mark.slow),
        pytest.param((2, 1), {0: "rsa", 1: "ulysses", 2: "ring", 3: "zigzag", 4: "hybrid"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sequences_that_ranks_share_too(mesh, modes, plain):
    for run, found in beside_sequences(mesh, modes):
        assert_close(found[0], plain[RUNS.index(run)])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (1, 2, "1d")], ids=str)
def test_beside_data_parallelism(mesh):
    runs = RUNS[:2]
    rows, columns, *mode = mesh
    for found, expected in zip(on_mesh(4, rows, columns, runs, *mode), on_mesh(2, 1, 1, runs), strict=True):
        assert_alike(found)
        for rank in range(4):
            assert_close({**expected[rank // 2], **found[rank]}, expected[rank // 2])


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "precision", "budget"),
    [
        (2, (1, 2), "fp32", "315KB"),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                (2, (1, 2, "1d"), "bf16", "195KB"),
                (2, (1, 2), "bf16", "195KB"),
                (4, (2, 2), "fp32", "175KB"),
                (4, (2, 2), "bf16", "115KB"),
                (4, (1, 2), "fp32", "250KB"),
                (4, (2, 1), "bf16", "135KB"),
            )
        ),
    ],
)
def test_budgets_change_no_bit(num_ranks, mesh, precision, budget):
    scarce = {"device_memory": budget, "default_chunk_size": 1024}
    roomy = MeshRun(LLAMA, precision=precision)
    rows, columns, *mode = mesh
    plenty, small = on_mesh(num_ranks, rows, columns, [roomy, dataclasses.replace(roomy, options=scarce)], *mode)
    assert small[0]["report"]["num_evictions"] > 0
    assert small[0]["report"]["num_replayed_accesses"] > 0
    for one, other in zip(plenty, small, strict=True):
        assert one["losses"] == other["losses"]
        assert one["norms"] == other["norms"]
        assert_same_bits(other["state"], one["state"])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (1, 2, "1d")], ids=str)
def test_loss_scale_and_skipped_steps_are_the_same_on_all_ranks(mesh):
    run = MeshRun(GPT2, precision="fp16", options={"fp16": SCALE})
    rows, columns, *mode = mesh
    expected, (found,) = train_all([run])[0], on_mesh(2, rows, columns, [run], *mode)
    skipped = [math.isnan(norm) for norm in expected["norms"]]
    assert 0 < sum(skipped) < len(skipped)
    for rank in found:
        assert rank["scales"] == expected["scales"]
        assert [math.isnan(norm) for norm in rank["norms"]] == skipped
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-2)
        assert_same_bits(rank["state"], found[0]["state"])


REFUSED = {
    "too many columns": "a mesh of data 1 x columns 3 has 3 ranks, but the run has 2; take data 1 x columns 2, or",
    "heads": "attention: heads: 3 cannot be cut into 2 columns of a mesh of 1 x 2; take 4, or a mesh of 2 x 1",
    "too many for sequences": "a mesh of data 1 x sequence 2 x columns 2 has 4 ranks, but the run has 2; take",
    "no plan": "T5ForConditionalGeneration cannot be sharded over a mesh: it is an encoder-decoder model",
}
REFUSED_TOO = {
    "too many ranks": "a mesh of data 1 x rows 2 x columns 2 has 4 ranks, but the run has 2",
    "features": "features: 33 cannot be cut into 2 columns of a mesh of 1 x 2; take 32, or a mesh of 2 x 1",
    "parameters beside": "Wrapped has parameters beside those of its LlamaForCausalLM",
    "other values": "ranks disagree on the model's values before it is divided",
    "other batches": "ranks [0, 1] share matrices, but were called with different batches",
    "samples": "dimension 0 of [3, 24]: 3 cannot be cut into 2 rows of a mesh of 2 x 1; take 4",
    "no values": "is on the meta device without values",
    "tokens": "sequences of 23 tokens cannot be divided among 2 ranks; give 24",
}


@pytest.mark.parametrize("refused", [REFUSED, pytest.param(REFUSED_TOO, marks=pytest.mark.slow)], ids=["", "more"])
def test_what_cannot_be_sharded_is_refused(refused):
    for messages in run_ranks(2, go_wrong, list(refused)):
        for message, part in zip(messages, refused.values(), strict=True):
            assert part in message


def test_a_forward_that_runs_out_of_memory_names_the_module_and_what_helps():
    other, failed = run_ranks(2, run_out, MeshRun(LLAMA, columns=2, steps=3))
    assert other.startswith("RankFailure: ") and "rank 1: OutOfMemoryError: CUDA out of memory" in other
    for part in ("in model.layers.1.post_attention_layernorm", "2.5 GiB more", "was not run again", "tensor_parallel"):
        assert part in failed


def test_a_batch_that_outgrows_the_device_ends_with_the_least_that_would_do():
    run = MeshRun(LLAMA, columns=2, steps=2, clip=0.0, options={"default_chunk_size": 4096})
    free, tight = run_ranks(2, outgrow, run, (None, 600_000))[0]
    assert tight.startswith("MemoryBudgetError: ") and "raise device_memory to at least" in tight
    assert run_ranks(2, outgrow, run, (least_named(tight),)) == [[free]] * 2


@pytest.mark.parametrize(
    ("model", "meshes"),
    [
        ("Qwen3MoeForCausalLM", ((1, 2), (1, 1), (1, 2))),  # norms and experts that all ranks have
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                ("gpt2", ((1, 2), (1, 1), (1, 2))),
                ("Olmo2ForCausalLM", ((1, 2, "1d"), (2, 2), (1, 1))),
                ("MixtralForCausalLM", ((2, 2), (1, 2, "1d"), (2, 1))),
                ("llama", ((2, 2), (1, 2), (2, 2), (1, 1))),
                ("qwen2", ((1, 1), (1, 2), (2, 1))),
                ("gpt2", ((2, 2), (4, 1), (2, 1))),
                ("llama", ((1, 2, "1d"), (1, 2), (1, 1), (1, 2, "1d"))),
                ("gpt2", ((2, 1), (1, 2, "1d"), (1, 4, "1d"))),
                ("llama", ((1, 2, "2d", 2), (1, 2, "2d"), (2, 1, "2d", 2), (1, 1))),
            )
        ),
    ],
)
def test_checkpoints_move_between_meshes(tmp_path, model, meshes):
    import transformers

    from patrickstar.checkpoint.reader import Checkpoint
    from patrickstar.checkpoint.stored_source import merge

    folder = str(tmp_path)
    sizes = {mesh: math.prod(part for part in mesh if isinstance(part, int)) for mesh in meshes}
    saved = run_ranks(sizes[meshes[0]], checkpointed, folder, model, *meshes[0])  # rows, columns, mode, sequence
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert_same_bits(dict(exported.state_dict()), dict(saved[0]["half_way"]))
    for mesh in meshes[1:]:
        for found in run_ranks(sizes[mesh], checkpointed, folder, model, *mesh):
            assert_same_bits(found["half_way"], saved[0]["half_way"])
            assert found["losses"] == pytest.approx(saved[0]["losses"], rel=1e-6)
            assert relative_error(found["state"], saved[0]["state"]) <= 1e-6
            assert found["made_whole"] == (meshes[0][:3] not in ((1, 1), mesh[:3]))
            if mesh == meshes[0]:
                assert_same_bits(found["state"], saved[0]["state"])
    with Checkpoint.find(folder) as checkpoint:
        checkpoint.verify()
        with Checkpoint(merge(checkpoint, tmp_path / "merged")) as merged:
            for name, value in saved[0]["half_way"].items():
                stored = merged.tensor(name, "master")
                if stored is not None:  # another name of a tied parameter
                    assert stored.shape == value.shape and "@" not in str(list(merged.manifest.tensors))


@pytest.mark.slow
def test_checkpoints_of_shards_of_blocks(tmp_path):
    folder = str(tmp_path)
    saved = run_ranks(4, checkpointed, folder, "gpt2", 1, 2)
    for num_ranks, mesh in ((4, (1, 2)), (4, (2, 1)), (2, (1, 2)), (1, (1, 1))):
        for rank, found in enumerate(run_ranks(num_ranks, checkpointed, folder, "gpt2", *mesh)):
            assert_same_bits(found["half_way"], saved[0]["half_way"])
            if num_ranks == 4:
                assert found["losses"] == pytest.approx(saved[rank]["losses"], rel=1e-6)
                assert relative_error(found["state"], saved[0]["state"]) <= 1e-6


@pytest.mark.parametrize(
    "further", [(), pytest.param(((1, 2, "2d", 2), (2, 1, "2d", 2)), marks=pytest.mark.slow)], ids=["", "sequences"]
)
def test_blocks_are_read_out_of_hugging_faces_files(tmp_path, further):
    torch.manual_seed(0)
    model = LLAMA.build()
    model.save_pretrained(tmp_path)
    (inputs,) = MeshRun(LLAMA, steps=1).batches()
    expected = model.eval().generate(inputs["input_ids"][:2, :4], max_new_tokens=6, do_sample=False)
    loss = model.train()(**inputs).loss.item()
    for mesh in ((1, 2, "2d"), (2, 1, "2d"), (1, 2, "1d"), *further):
        for found in run_ranks(2 * (len(mesh) - 2), from_files, str(tmp_path), *mesh):
            assert torch.equal(found["tokens"], expected)
            assert found["loss"] == pytest.approx(loss, rel=1e-6)
            assert found["after"] < loss - 1e-3  # of one step, in a plain model


@pytest.mark.parametrize(("mode", "whole"), [("2d", 0), ("auto", 5 * 32)])
def test_deepspeeds_name_of_columns(mode, whole):
    first, second = run_ranks(2, by_deepspeeds_names, mode)
    assert first == second and len(first["losses"]) == 2
    num_elements = sum(p.numel() for p in LLAMA.build().parameters())
    assert first["num_elements"] == (num_elements + whole) // 2 + 32

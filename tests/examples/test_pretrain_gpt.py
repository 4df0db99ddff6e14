import importlib
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmark.common import SHAPES, model_flops
from patrickstar.plan import Plan
from tests.bits import assert_same_bits
from tests.example_runs import imported_example, run_example

pytestmark = pytest.mark.slow

MODEL = ["--hidden", "32", "--layers", "2", "--heads", "2", "--length", "16", "--vocab", "300"]
TINY = [*MODEL, "--precision", "fp32", "--json"]


@pytest.fixture(scope="module")
def script():
    with imported_example("pretrain_gpt") as module:
        yield module


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return path


def steps_of(output: str) -> list[dict]:
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    left_out = ("event", "seconds", "tokens_per_second", "model_tflops_per_gpu")
    return [
        {key: value for key, value in event.items() if key not in left_out}
        for event in events
        if event["event"] == "step"
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def go_back_to(folder: Path, copy: Path, tag: str) -> None:
    shutil.copytree(folder / tag, copy / tag)
    (copy / "latest").write_text(f"{tag}\n", encoding="utf-8")


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_a_run_that_goes_on_is_bitwise_one_that_never_stopped(model, script, text, tmp_path, capsys):
    def run(*flags: object) -> list[dict]:
        common = ("--model", model, *TINY, "--data", text, "--accumulate", 2, "--dropout", 0.1, "--schedule-steps", 6)
        assert script.main([str(flag) for flag in (*common, *flags)]) == 0
        return steps_of(capsys.readouterr().out)

    straight = run("--steps", 6, "--export", tmp_path / "straight")
    first = run("--steps", 4, "--save-folder", tmp_path / "run")
    memory = ("--gpu-mem", "2MiB", "--chunk-numel", 4096)  # changes nothing
    then = run("--steps", 6, "--save-folder", tmp_path / "run", "--resume", "--export", tmp_path / "resumed", *memory)
    assert straight == first + then
    assert [step["step"] for step in straight] == [1, 2, 3, 4, 5, 6]
    assert len({step["loss"] for step in straight}) == 6
    assert (tmp_path / "straight" / "tokenizer.json").read_text() == (
        tmp_path / "resumed" / "tokenizer.json"
    ).read_text()
    expected, resumed = weights(tmp_path / "straight"), weights(tmp_path / "resumed")
    assert_same_bits(resumed, expected)


def test_ctrl_c_ends_after_the_step_and_is_gone_on_with(script, tmp_path, capsys, monkeypatch):
    flags = [*TINY, "--dropout", "0.1", "--steps", "4"]
    assert script.main(flags) == 0
    straight = steps_of(capsys.readouterr().out)
    add = script.Progress.add

    def interrupted(progress, step, *rest):
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        add(progress, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(script.Progress, "add", interrupted)
        assert script.main([*flags, "--save-folder", str(tmp_path)]) == 130
    printed = capsys.readouterr().out
    assert f"ended after step 2; saved to {tmp_path}; go on with" in printed and printed.endswith(" --resume\n")
    assert script.main([*flags, "--save-folder", str(tmp_path), "--resume"]) == 0
    assert steps_of(printed) + steps_of(capsys.readouterr().out) == straight


def test_two_ranks_go_on_bit_for_bit(tmp_path):
    common = [*TINY, "--batch", 2, "--dropout", 0.1, "--steps", 4, "--save-every", 2, "--save-folder"]
    straight = run_example("pretrain_gpt.py", *common, tmp_path / "run", ranks=2, timeout_seconds=120)
    assert straight.returncode == 0
    go_back_to(tmp_path / "run", tmp_path / "copy", "global_step2")
    then = run_example("pretrain_gpt.py", *common, tmp_path / "copy", "--resume", ranks=2, timeout_seconds=120)
    assert then.returncode == 0
    assert len(steps_of(straight.stdout)) == 4
    assert steps_of(straight.stdout)[2:] == steps_of(then.stdout)
    files = [sorted(path.name for path in (tmp_path / name / "global_step4").iterdir()) for name in ("run", "copy")]
    assert files[0] == files[1] and len(files[0]) == 3  # one of each rank, and the manifest
    for file in files[0]:
        if file.endswith(".safetensors"):
            first, second = (load_file(tmp_path / name / "global_step4" / file) for name in ("run", "copy"))
            assert_same_bits(second, first, file)


def test_two_ranks_train_as_one_with_their_batches_together(script, text, tmp_path, capsys):
    common = ["--model", "bert", *TINY, "--data", text, "--steps", 4, "--clipping", 0.5]
    assert script.main([str(flag) for flag in (*common, "--batch", 4, "--export", tmp_path / "one")]) == 0
    one = steps_of(capsys.readouterr().out)
    files = ["--export", tmp_path / "two", "--profile", tmp_path / "profile", "--save-plan", tmp_path / "plan.json"]
    result = run_example("pretrain_gpt.py", *common, "--batch", 2, *files, ranks=2, timeout_seconds=120)
    assert result.returncode == 0
    two = steps_of(result.stdout)
    for expected, found in zip(one, two, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    expected, found = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
    assert (tmp_path / "one" / "tokenizer.json").read_text() == (tmp_path / "two" / "tokenizer.json").read_text()
    for rank in range(2):
        assert (tmp_path / "profile" / f"rank-{rank}" / "step4.trace.json").is_file()
    Plan.load(tmp_path / "plan.json")


def test_flags_reach_the_configuration(script, tmp_path):
    arguments = importlib.import_module("pretraining.arguments")
    further = tmp_path / "further.json"
    further.write_text(
        '{"delays": {"link_gbps": 2.0}, "host_threads": {"affinity": "free"}, "fp16": {"loss_scale": 8}}'
    )
    (tmp_path / "plan.json").write_text("{}")
    flags = "--gpu-mem 3MiB --host-mem 1GiB --chunk-numel 2048 --margin-use-ratio 0.5 --lr 0.1 "
    flags += "--states-on-host --cpu-embedding --speculation always --host-threads 2 --clipping 0.25 "
    flags += f"--rank-timeout 9 --precision fp16 --config {further} --plan {tmp_path / 'plan.json'} --profile p"
    config = arguments.parse_arguments(flags.split(), None).training.engine_config()
    assert config["optimizer"]["params"] == {
        "lr": 0.1,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "use_hybrid_adam": False,
    }
    del config["optimizer"]["params"]
    assert config == {
        "optimizer": {"type": "AdamW", "speculation": "always", "states": "fp32"},
        "fp16": {"enabled": True, "loss_scale": 8},
        "gradient_clipping": 0.25,
        "device_memory": "3MiB",
        "host_memory": "1GiB",
        "steps_per_print": 0,
        "default_chunk_size": 2048,
        "client": {"mem_tracer": {"margin_use_ratio": 0.5}},
        "use_cpu_embedding": True,
        "plan": str(tmp_path / "plan.json"),
        "profile": {"step": 4, "output": "p"},
        "host_threads": {"num_threads": 2, "affinity": "free"},
        "rank_timeout_seconds": 9.0,
        "delays": {"link_gbps": 2.0},
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--heads 3", "--hidden is 128, no multiple of --heads 3"),
        ("--size 5b", "--size: it is '5b'; give one of tiny"),
        ("--batch 0", "--batch-size is 0; give 1 or more"),
        ("--gpu-mem much", "device_memory is 'much'"),
        ("--speculation commit --clipping 0 --accumulate 2", "leave out one"),
        ("--speculation commit", "gradient_clipping"),
        ("--data nowhere", "--data nowhere does not exist"),
        ("--data {tmp} ", "has no *.txt below it"),
        ("--data {tmp}/odd.bin", "has 3 bytes"),
        ("--data {tmp}/few.bin", "has 2 tokens, --length is 64"),
        ("--data {tmp}/a.text --vocab 100", "leaves 100 ids for text; give what leaves 257 to 65536"),
        ("--data {tmp}/a.text --save-tokens x.txt", "ends in .bin"),
        ("--save-tokens x.bin", "give one with --data"),
        ("--resume", "need --save-folder"),
        ("--resume --save-folder {tmp}", "has no checkpoint"),
        ("--export {tmp}", "exists and is not empty"),
        ("--plan nothing.json", "does not exist"),
        ("--config {tmp}/a.text", "cannot be read"),
        ("--config {tmp}/unknown.json", "gradient_clipping"),
    ],
)
def test_what_is_wrong_is_said_before_work_starts(flags, message, script, tmp_path, capsys, monkeypatch):
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "few.bin").write_bytes(b"abcd")
    (tmp_path / "a.text").write_text("text")
    (tmp_path / "unknown.json").write_text('{"gradient_cliping": 1}')
    monkeypatch.setattr(script, "pretrain", None)
    assert script.main(flags.format(tmp=tmp_path).split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("pretrain_gpt.py: ")


def test_a_model_that_does_not_fit_is_an_answer(script, capsys):
    assert script.main([*TINY, "--gpu-mem", "10KB"]) == 1
    assert "device_memory is 9.77 KiB (10000 bytes)" in capsys.readouterr().err


def test_a_folder_with_a_run_is_not_overwritten(script, tmp_path, capsys):
    flags = [*TINY, "--steps", "1", "--save-folder", str(tmp_path)]
    assert script.main(flags) == 0
    assert script.main(flags) == 2
    assert "holds a run (global_step1); give --resume" in capsys.readouterr().err
    assert script.main([*flags, "--resume"]) == 1
    assert "1 steps were made, --steps is 1" in capsys.readouterr().err
    assert script.main([*flags, "--resume", "--steps", "2", "--seed", "5"]) == 1
    assert "began with --seed 0" in capsys.readouterr().err


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_saved_tokens_are_the_text(tokenizer, script, text, tmp_path, capsys):
    (tmp_path / "texts" / "below").mkdir(parents=True)
    texts = ["first text, häßlich\r\n", "second text " * 40]
    (tmp_path / "texts" / "a.txt").write_bytes(texts[0].encode())
    (tmp_path / "texts" / "below" / "b.txt").write_bytes(texts[1].encode())
    flags = [*TINY, "--steps", "2", "--tokenizer", tokenizer]
    saved = tmp_path / "tokens.bin"
    assert script.main([*flags, "--data", str(tmp_path / "texts"), "--save-tokens", str(saved)]) == 0
    from_text = steps_of(capsys.readouterr().out)
    assert script.main([*flags, "--data", str(saved)]) == 0
    assert steps_of(capsys.readouterr().out) == from_text
    tokens = script.np.fromfile(saved, dtype="<u2").tolist()
    ends = [index for index, token in enumerate(tokens) if token == 0]
    assert len(ends) == 2 and ends[1] == len(tokens) - 1
    parts = [tokens[: ends[0]], tokens[ends[0] + 1 : -1]]
    if tokenizer == "bytes":
        decoded = [bytes(token - 1 for token in part).decode() for part in parts]
    else:
        from tokenizers import Tokenizer

        trained = Tokenizer.from_file(str(saved.with_suffix(".tokenizer.json")))
        decoded = [trained.decode(part) for part in parts]
    assert decoded == texts


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_ranks_divide_what_one_would_take(model, script):
    batches, models, tokens = (
        importlib.import_module(f"pretraining.{name}") for name in ("batches", "models", "tokens")
    )
    shape = models.ModelShape(kind=models.ModelKind(model), hidden=8, layers=1, heads=1, vocab=50, length=16)
    corpus = tokens.Corpus(script.np.arange(12 * 16 + 5, dtype="<u2") // 16, 49, 16, 3, "corpus")
    for source in (corpus, tokens.RandomTokens(shape.num_data_tokens, 16, 3)):
        whole = batches.Batches(source=source, shape=shape, num_rows=6).after(7)
        parts = [
            batches.Batches(source=source, shape=shape, num_rows=2, rank=rank, num_ranks=3).after(7)
            for rank in range(3)
        ]
        for name, values in whole.items():
            assert values.shape == (6, 16) and values.dtype == torch.int64
            assert torch.equal(torch.cat([part[name] for part in parts]), values)
        assert int(whole["input_ids"].max()) < shape.vocab
        counts = (whole["labels"] != -100).sum(1)
        assert counts.tolist() == [16 if model == "gpt" else 2] * 6
    epochs = [[int(corpus.sample(epoch * 12 + index)[0]) for index in range(12)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12)) and epochs[0] != epochs[1]
    with pytest.raises(ValueError, match="corpus has token 11, the model's data tokens are 0 to 9"):
        [tokens.Corpus(corpus._tokens, 10, 16, 3, "corpus").sample(index) for index in range(12)]


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_models_are_initialised_as_on_the_cpu(model, script):
    models, training = importlib.import_module("pretraining.models"), importlib.import_module("pretraining")
    shape = models.ModelShape(kind=models.ModelKind(model), hidden=64, layers=2, heads=2, vocab=300, length=16)
    built = models.build_model(shape)
    assert all(param.is_meta for param in built.parameters())
    run = training.Pretraining(lambda: built, training.TrainingOptions(precision="fp32"))
    state = run._engine.state_dict()
    buffers = dict(run._engine.named_buffers())
    run.discard()
    reference = type(built)(built.config)
    assert state.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        assert state[name].shape == value.shape
        assert float(state[name].std()) == pytest.approx(float(value.std()), rel=0.3, abs=1e-8), name
        if value.dim() == 1:
            assert_same_bits(state[name], value, name)
    for name, value in reference.named_buffers():
        assert_same_bits(buffers[name], value, name)


def test_sizes_are_the_benchmarks(script):
    models = importlib.import_module("pretraining.models")
    both = models.SIZES.keys() & SHAPES.keys()
    assert {"tiny", "4.3b", "18.5b"} <= both
    for name in both:
        theirs = SHAPES[name]
        assert models.SIZES[name] == (theirs.hidden, theirs.layers, theirs.heads, theirs.vocab, theirs.length)
        values = zip(("hidden", "layers", "heads", "vocab", "length"), models.SIZES[name], strict=True)
        shape = models.ModelShape(**dict(values))
        assert shape.model_flops(theirs.num_parameters(), 3) == model_flops(theirs, 3)

import sys
from pathlib import Path

import pytest

from patrickstar.command.flags import UsageError
from patrickstar.finetune.arguments import parse_arguments
from tests.finetune.tiny import run


def settings(tmp_path: Path, text: str, *flags: object):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    args, mistakes = parse_arguments(["--config", str(path), *map(str, flags)])
    return args, [mistake.removeprefix(f"{path}:") for mistake in mistakes]


WHOLE = """# a run
model: models/llama
data: chat.jsonl
method: qlora
lr: 1e-4  # YAML 1.1 reads a string
weight_decay: 0
device-memory: 8GiB
batch_size: 2
gradient-accumulation: 4
packing: true
checkpointing: no
steps:
output-dir: "out put"
"""


def test_a_file_says_what_flags_say(tmp_path):
    args, mistakes = settings(tmp_path, WHOLE)
    flags = "--model models/llama --data chat.jsonl --method qlora --lr 1e-4 --weight-decay 0 --device-memory 8GiB"
    flags += " --batch-size 2 --gradient-accumulation 4 --packing --no-checkpointing --output-dir"
    expected, _ = parse_arguments([*flags.split(), "out put"])
    assert mistakes == []
    assert vars(args) == vars(expected) | {"config": tmp_path / "run.yaml"}
    assert (args.lr, args.device_memory, args.quantization, args.steps) == (1e-4, 8 * 2**30, "nf4", None)


def test_flags_win_over_the_file(tmp_path):
    args, _ = settings(tmp_path, WHOLE, "--lr", "2e-4", "--method", "full", "--no-packing", "--seed", 3)
    assert (args.lr, args.method, args.lora, args.packing, args.seed) == (2e-4, "full", False, False, 3)
    assert (args.batch_size, args.weight_decay) == (2, 0)
    args, _ = settings(tmp_path, "steps: 60\nlora: true\n", "--epochs", 2)
    assert (args.steps, args.epochs, args.method) == (None, 2.0, "lora")


def test_every_mistake_has_its_line(tmp_path):
    text = "modle: a\nbatch_sizes: 2\nlr: fast\nbatch-size: 2.5\npacking: 'yes'\nseed: true\n"
    text += "steps: [1, 2]\nmethod: lroa\noutput: a\noutput_dir: b\nconfig: c\n"
    _, mistakes = settings(tmp_path, text, "--epoch", 1)
    assert mistakes == [
        "1: there is no key modle; did you mean model?",
        "2: there is no key batch_sizes; did you mean batch-size?",
        "3: --lr/--learning-rate: it is 'fast'; give a number of more than 0",
        "4: --batch-size: it is '2.5'; give a whole number of at least 1",
        '5: packing is "yes"; give true or false',
        "6: seed is true; give one value",
        "7: steps is [1, 2]; give one value",
        "8: --method: it is 'lroa'; give one of full, lora, qlora",
        "10: output_dir is in line 9 too; give it once",
        "11: config is for the command line alone",
        "there is no flag --epoch; did you mean --epochs?",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"- lr", "has no keys; a line is, for example, lr: 1e-4"),
        (b"lr: 1\n lr: [", "is no YAML: mapping values are not allowed here"),
        (b"lr: \xff", "is no UTF-8 (byte 4)"),
    ],
)
def test_a_file_that_has_no_settings_is_refused(content, said, tmp_path):
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(UsageError) as refused:
        parse_arguments(["--config", str(tmp_path / "run.yaml")])
    assert said in str(refused.value)


def test_an_empty_file_says_nothing(tmp_path):
    args, mistakes = settings(tmp_path, "# nothing\n")
    assert mistakes == [] and args.lr == parse_arguments([])[0].lr


def test_without_pyyaml_the_remedy_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match="--config needs PyYAML: pip install pyyaml"):
        settings(tmp_path, "lr: 1")


def test_a_run_from_a_file_trains(folders, chat, tmp_path, monkeypatch):
    path = tmp_path / "run.yaml"
    lines = [f"model: {folders('llama')}", f"data: {chat}", "method: qlora", "lr: 1e-3", "steps: 2", "lora_rank: 2"]
    path.write_text("\n".join([*lines, f"output-dir: {tmp_path / 'out'}"]), encoding="utf-8")
    seen = run(monkeypatch, "--config", path, "--lr", "1e-2")
    assert seen.code == 0 and len(seen.run.scores) == 2
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()

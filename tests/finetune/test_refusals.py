import importlib.util
import shlex
import sys

import pytest
import torch
import transformers
from safetensors.torch import save_file

from patrickstar.finetune import tuning
from patrickstar.finetune.flags import default_precision
from patrickstar.finetune.main import main
from tests.finetune.tiny import TURNS, make_tokenizer, write_lines

BROKEN_LINES = [
    ('{"prompt": "a", "answer": "b"}\n{"prompt": "a",}', ":2: is no JSON (Illegal trailing comma"),
    ("[1]", ":1: is a JSON list, not an object"),
    ('{"text": "a"}', ':1: has the keys "text", but neither "messages"'),
    ('{"prompt": "a", "answer": " "}', ':1: has "answer": " "; it must be a text that is not empty'),
    ('{"messages": []}', ':1: "messages" is [], not a list of messages'),
    (
        '{"messages": [{"role": "tool", "content": "a"}]}',
        ':1: messages[0] has "role": "tool"; it must be one of system',
    ),
    ('{"messages": [{"role": "user", "content": 3}]}', ':1: messages[0] has "content": 3'),
    ('{"messages": [{"role": "user", "content": "a"}]}', ":1: has no message of the assistant"),
    ('{"messages": [{"role": "assistant", "content": "a"}]}', ":1: begins with an answer"),
    ('{"conversations": [{"from": "bot", "value": "a"}]}', ':1: conversations[0] has "from": "bot"'),
    ('{"prompt": "\\ud800", "answer": "b"}', ":1: has half of a surrogate pair"),
    ("\n\n", "has no line"),
    ("x\n" * 5, ":3: is no JSON (Expecting value at column 1); and 2 lines more"),
    ('{"prompt": "a", "answer": "b"}', "has one conversation, of which none can be held out"),
]


def mistakes(capsys, *flags: object) -> list[str]:
    assert main([str(flag) for flag in flags], prog="finetune") in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("finetune: ") for line in lines), lines
    return [line.removeprefix("finetune: ") for line in lines]


def refusal(capsys, *flags: object) -> str:
    (mistake,) = mistakes(capsys, *flags)
    return mistake


@pytest.mark.parametrize(("text", "message"), BROKEN_LINES)
def test_a_broken_line_is_refused_before_anything_is_loaded(text, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tuning, "tune", None)
    path = tmp_path / "chat.jsonl"
    path.write_text(text, encoding="utf-8")
    error = refusal(capsys, "--data", path, "--output-dir", tmp_path / "out")
    if sys.version_info >= (3, 13) or "trailing comma" not in message:
        assert message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data nowhere.jsonl", "nowhere.jsonl cannot be read (No such file or directory)"),
        ("--model nowhere", "--model nowhere is no folder"),
        ("--model {tmp}", "has no config.json"),
        ("--model {tmp}/no-tokenizer", "has no tokenizer"),
        ("--model {tmp}/no-weights", "has neither model.safetensors nor"),
        ("--model {tmp}/t5", "is of type t5, which is no causal language model"),
        ("--model {tmp}/broken", "its tokenizer cannot be loaded"),
        ("--model {llama} --seq-len 300", "the model takes rows of 256 tokens"),
        ("--model {mistral} --data {tmp}/system.jsonl", "the tokenizer's chat template refuses it: Only"),
        ("--model Qwen/Qwen3-8B", "models/Qwen3-8B after: hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B"),
        ("--lora", "give one with --model"),
        ("--method lroa", "--method: it is 'lroa'; give one of full, lora, qlora"),
        ("--lerning-rate 1e-4", "there is no flag --lerning-rate; did you mean --learning-rate?"),
        ("--epoch 1", "there is no flag --epoch; did you mean --epochs?"),
        ("more", "'more' belongs to no flag"),
        ("--batch-size", "--batch-size: expected one argument"),
        ("--model {llama} --quantization nf4", "give --lora too"),
        ("--model {llama} --precision fp16 --fp8 block", "fp8 is enabled without bf16"),
        ("--kernels liger", "liger-kernel is not installed; pip install liger-kernel"),
        ("--lr zero", "--lr/--learning-rate: it is 'zero'; give a number of more than 0"),
        ("--batch-size 0", "--batch-size: it is '0'; give a whole number of at least 1"),
        ("--device-memory much", "--device-memory: 'much' is no amount of memory"),
        ("--model {llama} --device-memory 10KB", "device_memory is 9.77 KiB (10000 bytes)"),
        ("--output-dir {tmp}", "exists and is not empty; give --resume"),
        ("--output-dir {tmp}/config.json/x", "cannot be written (Not a directory)"),
        ("--resume --output-dir {tmp}", "has no checkpoint"),
        ("--model {mamba} --packing --seq-len 64", "MambaForCausalLM does not keep the conversations of a row apart"),
    ],
)
def test_a_mistake_is_one_line(flags, message, folders, chat, tmp_path, capsys):
    below = tmp_path / "below"
    below.mkdir()
    names = {"tmp": below, **{kind: folders(kind) for kind in ("llama", "mistral")}}
    if "{mamba}" in flags:
        names["mamba"] = below / "mamba"
        tokenizer = make_tokenizer(None)
        config = transformers.MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, state_size=4)
        transformers.MambaForCausalLM(config).save_pretrained(names["mamba"])
        tokenizer.save_pretrained(names["mamba"])
    system = [{"role": "system", "content": "Be kind."}, *TURNS]
    write_lines(below / "system.jsonl", [{"messages": system}] * 3)
    for name in ("no-tokenizer", "no-weights", "t5", "broken"):
        (below / name).mkdir()
        (below / name / "config.json").write_text('{"model_type": "%s"}' % ("t5" if name == "t5" else "llama"))
        if name != "no-tokenizer":
            (below / name / "tokenizer.json").write_text("{}")
        if name in ("t5", "broken"):
            save_file({"weight": torch.zeros(1)}, below / name / "model.safetensors")
    if "{tmp}/config.json" in flags:
        (below / "config.json").write_text("")
    given = shlex.split(flags.format(**names))
    given += [] if "--data" in given else ["--data", str(chat)]
    given += [] if "--output-dir" in given else ["--output-dir", str(tmp_path / "out")]
    capsys.readouterr()
    assert message in refusal(capsys, *given)


def test_all_mistakes_are_said_at_once(tmp_path, capsys):
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n', encoding="utf-8")
    (tmp_path / "out" / "mine").mkdir(parents=True)
    flags = "--lr fast --optimizer adm --model nowhere --warmup 2 --eval-share 0 --quantization nf4 --step 3"
    found = mistakes(capsys, *flags.split(), "--data", tmp_path / "chat.jsonl", "--output-dir", tmp_path / "out")
    for said in (
        "--lr/--learning-rate: it is 'fast'",
        "--optimizer: it is 'adm'; give one of AdamW, Lion",
        "--model nowhere is no folder",
        "--warmup: it is '2'; give a share, from 0 to 1",
        "--eval-share: it is '0'; give more than 0",
        "give --lora too",
        "there is no flag --step; did you mean --steps?",
        "chat.jsonl:2: has the keys",
        "exists and is not empty",
    ):
        assert len([line for line in found if said in line]) == 1, (said, found)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_missing_packages_are_named_with_the_remedy(tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("peft", "jinja2") else find(name))
    found = mistakes(capsys, "--model", "nowhere", "--lora", "--output-dir", tmp_path / "out")
    assert "jinja2, peft: not installed; pip install jinja2 peft" in found and len(found) == 2


@pytest.mark.parametrize(
    ("has_gpu", "has_bf16", "precision"), [(False, False, "fp32"), (True, False, "fp16"), (True, True, "bf16")]
)
def test_the_precision_is_the_fastest_of_the_device(has_gpu, has_bf16, precision, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16 or including_emulation)
    assert default_precision() == precision

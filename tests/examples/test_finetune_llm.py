import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
from example_runs import EXAMPLES, check_report, figure, imported_example, run_example, stop_after
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.bits import assert_same_bits

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (  # like Qwen3's: only the last answer shows its (empty) thoughts
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCT = (  # like Mistral's: nothing asks for an answer, and a system message is refused
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else "
    "message['role'] %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
MODELS = {  # class of the configuration, its sizes, the tokenizer's template
    "llama": ("LlamaConfig", SIZES, None),
    "qwen2": ("Qwen2Config", SIZES, CHATML),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": 16}, INSTRUCT),
    "gemma": ("GemmaConfig", SIZES | {"head_dim": 16}, GEMMA),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}, None),
}
DEFAULT = "### User:\n{}\n\n### Assistant:\n{}<eos>\n\n"  # what the documentation says of tokenizers without template

TURNS = [
    {"role": "user", "content": "Which is the first letter?"},
    {"role": "assistant", "content": "It is A, häßlich\nor not."},
    {"role": "user", "content": "And the last?"},
    {"role": "assistant", "content": "Z."},
]


@pytest.fixture(scope="module")
def example():
    with imported_example("finetune_llm") as module:
        yield module


@pytest.fixture(scope="module")
def encoding(example) -> ModuleType:
    return sys.modules["llm.encoding"]


@pytest.fixture(scope="module")
def conversations(example) -> ModuleType:
    return sys.modules["llm.conversations"]


def make_tokenizer(template: str | None) -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", chat_template=template
    )


def make_folder(folder: Path, kind: str) -> Path:
    class_name, sizes, template = MODELS[kind]
    tokenizer = make_tokenizer(template)
    config = getattr(transformers, class_name)(
        vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, **sizes
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    return lambda kind: made / kind if (made / kind).exists() else make_folder(made / kind, kind)


def write_lines(path: Path, lines: list) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def chat(tmp_path) -> Path:
    lines = [{"prompt": f"What is {n}?", "answer": f"One more than {n - 1}. " * (n % 3 + 1)} for n in range(1, 6)]
    lines += [{"messages": TURNS}]
    lines += [{"conversations": [{"from": "human", "value": "Go on?"}, {"from": "gpt", "value": "Yes."}]}]
    return write_lines(tmp_path / "chat.jsonl", lines)


FLAGS = ("--precision", "fp32", "--batch-size", "2", "--lr", "1e-2", "--samples", "1", "--sample-tokens", "4")


def run(example, monkeypatch, *flags: object) -> SimpleNamespace:
    seen = SimpleNamespace(run=None, task=None)
    train = example.common.train

    def watched(model_func, task, *rest):
        seen.task = task
        seen.run = train(model_func, task, *rest)
        return seen.run

    with monkeypatch.context() as patch:
        patch.setattr(example.common, "train", watched)
        seen.code = example.main([str(flag) for flag in (*FLAGS, *flags)])
    return seen


def answer_losses(model, tokenizer, conversations) -> torch.Tensor:
    losses = []
    for tokens in conversations:
        ids, labels = torch.tensor([tokens.input_ids]), torch.tensor(tokens.labels)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[:-1].float(), labels[1:], reduction="none"))
        losses[-1] = losses[-1][labels[1:] != -100]
    return torch.cat(losses)


def logits_of(model, tokenizer) -> torch.Tensor:
    ids = torch.tensor([tokenizer("What is 3?").input_ids])
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("kind", MODELS)
def test_every_model_trains_within_a_budget_and_is_saved(
    kind, example, encoding, conversations, folders, chat, monkeypatch, tmp_path, capsys
):
    folder, output = folders(kind), tmp_path / "output"
    memory = ("--device-memory", "8MiB", "--checkpointing")
    flags = ("--model", folder, "--data", chat, "--eval-data", chat, "--packing", "--seq-len", 128, "--steps", 2)
    seen = run(example, monkeypatch, *flags, *memory, "--output-dir", output)
    assert seen.code == 0
    printed = capsys.readouterr().out
    assert f"saved to {output / 'model'}" in printed and "answers after the training" in printed
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = encoding.ChatEncoder(tokenizer)
    tokens = [each for conversation in conversations.read_conversations(chat) for each in encoder.tokens(conversation)]
    before, after = AutoModelForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(output / "model")
    for step, model in ((0, before), (2, after)):
        expected = answer_losses(model.eval(), tokenizer, tokens).mean().item()
        assert seen.run.evaluations[step].loss == pytest.approx(expected, rel=1e-5)
    saved = AutoTokenizer.from_pretrained(output / "model")
    assert saved.apply_chat_template(TURNS, tokenize=False) == tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert torch.equal(logits_of(after, saved), logits_of(seen.run.module, tokenizer))


@pytest.mark.parametrize("kind", MODELS)
def test_packed_losses_are_those_of_conversations_alone(kind, encoding, conversations, folders, chat):
    model = AutoModelForCausalLM.from_pretrained(folders(kind)).eval()
    encoder = encoding.ChatEncoder(AutoTokenizer.from_pretrained(folders(kind)))
    tokens = encoder.encode(conversations.read_conversations(chat), 128).examples
    alone = answer_losses(model, encoder.tokenizer, tokens)
    for rows in (encoding.packed_rows(tokens, 128, 0), encoding.padded_rows(tokens, 0)):
        inputs = encoding.model_inputs(rows)
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), inputs["labels"][:, 1:].flatten(), reduction="none"
        )
        losses = losses[inputs["labels"][:, 1:].flatten() != -100]
        torch.testing.assert_close(losses.sort().values, alone.sort().values, rtol=1e-5, atol=1e-5)
        assert losses.mean().item() == pytest.approx(model(**inputs, use_cache=False).loss.item(), rel=1e-5)


def test_packed_rows_hold_every_conversation_once(encoding):
    tokens = [encoding.Tokens([n] * n, [-100, *[n] * (n - 1)]) for n in (5, 9, 3, 8, 2, 2, 10, 1)]
    rows = encoding.packed_rows(tokens, 10, 0)
    assert rows["input_ids"].shape == (4, 10)  # 40 tokens
    found = []
    for ids, positions in zip(rows["input_ids"].tolist(), rows["position_ids"].tolist(), strict=True):
        starts = [index for index, position in enumerate(positions) if position == 0]
        found += [ids[begin:end] for begin, end in zip(starts, [*starts[1:], None], strict=True)]
    assert sorted(map(tuple, found)) == sorted(tuple(each.input_ids) for each in tokens)


# Answer tokens.


def spans_of(encoder, tokens) -> list[str]:
    found, last = [], None
    for index, label in enumerate(tokens.labels):
        if label != -100:
            assert label == tokens.input_ids[index]
            if last != index - 1:
                found.append([])
            found[-1].append(label)
            last = index
    return [encoder.tokenizer.decode(part) for part in found]


@pytest.mark.parametrize(
    ("template", "text", "answers"),
    [
        (
            CHATML,
            "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n",
            ["{}<|im_end|>", "{}<|im_end|>"],
        ),
        (INSTRUCT, "[INST] {} [/INST] {}<eos>", [" {}<eos>", " {}<eos>"]),
        (
            GEMMA,
            "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n{}<end_of_turn>\n",
            ["{}<end_of_turn>"] * 2,
        ),
        (None, DEFAULT, ["{}<eos>", "{}<eos>"]),
    ],
    ids=["chatml", "instruct", "gemma", "default"],
)
def test_only_answers_are_learned(template, text, answers, encoding, conversations):
    encoder = encoding.ChatEncoder(make_tokenizer(template))
    conversation = conversations.Conversation(tuple(conversations.Message(**turn) for turn in TURNS), "here")
    (tokens,) = encoder.tokens(conversation)
    words = [turn["content"] for turn in TURNS]
    bos = "<bos>" if template in (INSTRUCT, GEMMA) else ""
    whole = bos + text.format(*words[:2]) + text.format(*words[2:])
    assert tokens.input_ids == encoder.tokenizer(whole, add_special_tokens=False).input_ids
    assert spans_of(encoder, tokens) == [form.format(word) for form, word in zip(answers, words[1::2], strict=True)]
    prompt = encoder.prompt(conversation)
    assert tokens.input_ids[: len(prompt)] == prompt


def test_earlier_answers_that_a_template_writes_otherwise_are_examples_of_their_own(encoding, conversations):
    encoder = encoding.ChatEncoder(make_tokenizer(THINKING))
    conversation = conversations.Conversation(tuple(conversations.Message(**turn) for turn in TURNS), "here")
    first, second = encoder.tokens(conversation)
    thoughts = "<think>\n\n</think>\n\n"
    assert spans_of(encoder, first) == [f"{thoughts}{TURNS[1]['content']}<|im_end|>"]
    assert spans_of(encoder, second) == [f"{thoughts}{TURNS[3]['content']}<|im_end|>"]
    assert second.input_ids == encoder.tokenizer.apply_chat_template(TURNS, return_dict=False)


def test_what_is_too_long_is_cut_and_counted(
    encoding, conversations, example, folders, chat, monkeypatch, tmp_path, capsys
):
    encoder = encoding.ChatEncoder(make_tokenizer(CHATML))
    sets = [
        conversations.question("a" * 5, "b" * 90),
        conversations.question("a" * 90, "b"),
        conversations.question("a", "b"),
    ]
    encoded = encoder.encode(sets, 40)
    assert [len(tokens) for tokens in encoded.examples] == [40, len(encoder.tokens(sets[2])[0])]
    assert (encoded.num_cut, encoded.num_dropped) == (1, 1)
    flags = ("--model", folders("qwen2"), "--data", chat, "--eval-data", chat, "--seq-len", 32, "--steps", 1)
    assert run(example, monkeypatch, *flags, "--output-dir", tmp_path / "out").code == 0
    assert re.search(r"training data: \d of \d examples are cut to --seq-len 32 tokens", capsys.readouterr().out)


# Runs that go on, adapters.


@pytest.mark.parametrize(
    "adapts", [pytest.param(False, id="full"), pytest.param(True, id="lora", marks=pytest.mark.slow)]
)
def test_a_run_that_goes_on_is_bitwise_one_that_never_stopped(
    adapts, example, folders, chat, monkeypatch, tmp_path, capsys
):
    lora = ("--lora", "--lora-rank", 4) if adapts else ()
    flags = ("--model", folders("llama"), "--data", chat, *lora, "--gradient-accumulation", 2, "--steps", 4)
    straight = run(example, monkeypatch, *flags, "--output-dir", tmp_path / "straight")
    parts = (*flags, "--output-dir", tmp_path / "parts")
    with monkeypatch.context() as patch:
        stop_after(example, 2, patch)
        assert run(example, monkeypatch, *parts).code == 130
    assert "ended after step 2; saved to" in capsys.readouterr().out
    resumed = run(example, monkeypatch, *parts, "--resume", "--device-memory", "8MiB")
    assert "resumed from" in capsys.readouterr().out
    assert resumed.run.scores == straight.run.scores and resumed.run.evaluations == straight.run.evaluations
    kind, name = ("adapter", "adapter_model.safetensors") if adapts else ("model", "model.safetensors")
    first, second = (load_file(tmp_path / run_name / kind / name) for run_name in ("straight", "parts"))
    assert len(first) > 10
    assert_same_bits(second, first)


def test_adapters_load_with_peft(example, folders, chat, monkeypatch, tmp_path):
    folder = folders("qwen2")
    flags = ("--model", folder, "--data", chat, "--lora", "--packing", "--steps", 3, "--output-dir", tmp_path / "out")
    seen = run(example, monkeypatch, *flags)
    assert seen.run.final.loss < seen.run.evaluations[0].loss
    base = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "adapter")
    before = logits_of(base, tokenizer)
    after = logits_of(PeftModel.from_pretrained(base, tmp_path / "out" / "adapter"), tokenizer)
    torch.testing.assert_close(after, logits_of(seen.run.module, tokenizer), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(after, before, atol=1e-3)


def test_a_frozen_model_in_4_bits(example, folders, chat, monkeypatch, tmp_path):
    flags = ("--model", folders("llama"), "--data", chat, "--lora", "--steps", 3, "--output-dir")
    losses = [
        run(example, monkeypatch, *flags, tmp_path / name, *more).run.evaluations[0].loss
        for name, more in (("whole", ()), ("nf4", ("--quantization", "nf4")))
    ]
    assert losses[0] != losses[1]  # the same model, a little off
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_ctrl_c_saves_and_the_printed_command_goes_on(folders, chat, tmp_path):
    flags = (
        "--model",
        folders("llama"),
        "--data",
        chat,
        "--steps",
        100,
        "--samples",
        0,
        "--output-dir",
        tmp_path / "o",
    )
    command = [sys.executable, str(EXAMPLES / "finetune_llm.py"), *map(str, (*FLAGS[:-4], *flags))]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step 0:"):
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "finishing this step" in error and "Traceback" not in error
    printed = output.splitlines()
    assert re.fullmatch(rf"ended after step \d+; saved to {tmp_path}/o/checkpoint; go on with", printed[-2])
    done = subprocess.run(printed[-1].strip(), shell=True, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout and f"saved to {tmp_path}/o/model" in done.stdout
    assert "100/100" in done.stderr


@pytest.mark.slow
def test_two_ranks_train_as_one_with_their_batches_together(example, folders, chat, monkeypatch, tmp_path):
    flags = ["--model", folders("llama"), "--data", chat, "--steps", 4, "--clip", 0, "--lr", "1e-3"]
    one = run(example, monkeypatch, *flags, "--batch-size", 4, "--output-dir", tmp_path / "one")
    rest = ["--lr", "1e-3", "--precision", "fp32", "--samples", 1, "--sample-tokens", 4, "--batch-size", 2]
    two = run_example("finetune_llm.py", *flags, *rest, "--output-dir", tmp_path / "two", ranks=2, timeout_seconds=200)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("answers after the training") == two.stdout.count("saved to") == 1
    assert figure(two.stdout, r"held-out loss +([0-9.]+)") == pytest.approx(one.run.final.loss, rel=1e-4)
    assert figure(two.stdout, r"training loss +([0-9.]+)") == pytest.approx(one.run.scores[-1].loss, rel=1e-4)
    weights = [load_file(tmp_path / folder / "model" / "model.safetensors") for folder in ("one", "two")]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-2, atol=1e-3)


# Refusals.


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


def refusal(example, capsys, *flags: object) -> str:
    assert example.main([str(flag) for flag in flags]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("finetune_llm.py: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(("text", "message"), BROKEN_LINES)
def test_a_broken_line_is_refused_before_anything_is_loaded(text, message, example, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(example, "run_example", None)
    path = tmp_path / "chat.jsonl"
    path.write_text(text, encoding="utf-8")
    error = refusal(example, capsys, "--data", path, "--output-dir", tmp_path / "out")
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
        ("--lora", "give one with --model"),
        ("--model {llama} --quantization nf4", "give --lora too"),
        ("--lr zero", "invalid float value: 'zero'"),
        ("--batch-size 0", "--batch-size is 0; give 1 or more"),
        ("--device-memory much", "device_memory is 'much'"),
        ("--model {llama} --device-memory 10KB", "device_memory is 10000 bytes"),
        ("--output-dir {tmp}", "exists and is not empty; give --resume"),
        ("--output-dir {tmp}/config.json/x", "cannot be written (Not a directory)"),
        ("--resume --output-dir {tmp}", "has no checkpoint"),
        ("--model {mamba} --packing --seq-len 64", "MambaForCausalLM does not keep the conversations of a row apart"),
    ],
)
def test_a_mistake_is_one_line(flags, message, example, folders, chat, tmp_path, capsys):
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
    assert message in refusal(example, capsys, *given)


# The demo.


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo") / "output"
    small = ("--hidden", 128, "--vocab-size", 400, "--seq-len", 96, "--batch-size", 1, "--lr", "5e-3")
    flags = (*small, "--device-memory", "8MiB", "--steps", 50, "--precision", "fp32", "--output-dir", folder)
    result = run_example("finetune_llm.py", "--demo", *flags)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


def commands_after(output: str) -> list[str]:
    lines = output.split("\nNext:\n")[1].splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def run_in_shell(command: str) -> str:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_demo_learns_and_keeps_its_budget(demo):
    _, output = demo
    check_report(output.split("\nThe same run")[0], "unigram baseline")
    summary = output.split("\nDemo\n")[1]
    assert "50 losses, 6 held-out scores: bitwise the same without the budget" in summary
    assert "final state_dict: bitwise the same without the budget" in summary
    budget = figure(summary, r"device budget +([0-9.]+) MiB")
    assert figure(summary, r"device peak +([0-9.]+) MiB") <= budget < figure(summary, r"model data +([0-9.]+) MiB")


@pytest.mark.slow
def test_the_commands_that_the_demo_prints_work(demo):
    folder, output = demo
    ask, tune, plan, flags = commands_after(output)
    assert all(command.count(sys.executable) == 1 for command in (ask, tune, plan, flags))
    assert run_in_shell(ask)
    assert f"saved to {folder}/next/adapter" in run_in_shell(f"{tune} --steps 1 --samples 0")
    assert "\nfits: " in run_in_shell(plan)
    assert "(default: demo-output" not in run_in_shell(flags)

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from patrickstar.finetune.conversations import Conversation, Message, question, read_conversations
from patrickstar.finetune.encoding import ChatEncoder, Tokens, model_inputs, packed_rows, padded_rows
from tests.finetune.tiny import (
    CHATML,
    DEFAULT,
    GEMMA,
    INSTRUCT,
    MODELS,
    THINKING,
    TURNS,
    answer_losses,
    make_tokenizer,
    run,
)


@pytest.mark.parametrize("kind", MODELS)
def test_packed_losses_are_those_of_conversations_alone(kind, folders, chat):
    model = AutoModelForCausalLM.from_pretrained(folders(kind)).eval()
    encoder = ChatEncoder(AutoTokenizer.from_pretrained(folders(kind)))
    tokens = encoder.encode(read_conversations(chat), 128).examples
    alone = answer_losses(model, encoder.tokenizer, tokens)
    for rows in (packed_rows(tokens, 128, 0), padded_rows(tokens, 0)):
        inputs = model_inputs(rows)
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), inputs["labels"][:, 1:].flatten(), reduction="none"
        )
        losses = losses[inputs["labels"][:, 1:].flatten() != -100]
        torch.testing.assert_close(losses.sort().values, alone.sort().values, rtol=1e-5, atol=1e-5)
        assert losses.mean().item() == pytest.approx(model(**inputs, use_cache=False).loss.item(), rel=1e-5)


def test_packed_rows_hold_every_conversation_once():
    tokens = [Tokens([n] * n, [-100, *[n] * (n - 1)]) for n in (5, 9, 3, 8, 2, 2, 10, 1)]
    rows = packed_rows(tokens, 10, 0)
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
def test_only_answers_are_learned(template, text, answers):
    encoder = ChatEncoder(make_tokenizer(template))
    conversation = Conversation(tuple(Message(**turn) for turn in TURNS), "here")
    (tokens,) = encoder.tokens(conversation)
    words = [turn["content"] for turn in TURNS]
    bos = "<bos>" if template in (INSTRUCT, GEMMA) else ""
    whole = bos + text.format(*words[:2]) + text.format(*words[2:])
    assert tokens.input_ids == encoder.tokenizer(whole, add_special_tokens=False).input_ids
    assert spans_of(encoder, tokens) == [form.format(word) for form, word in zip(answers, words[1::2], strict=True)]
    prompt = encoder.prompt(conversation)
    assert tokens.input_ids[: len(prompt)] == prompt


def test_earlier_answers_that_a_template_writes_otherwise_are_examples_of_their_own():
    encoder = ChatEncoder(make_tokenizer(THINKING))
    conversation = Conversation(tuple(Message(**turn) for turn in TURNS), "here")
    first, second = encoder.tokens(conversation)
    thoughts = "<think>\n\n</think>\n\n"
    assert spans_of(encoder, first) == [f"{thoughts}{TURNS[1]['content']}<|im_end|>"]
    assert spans_of(encoder, second) == [f"{thoughts}{TURNS[3]['content']}<|im_end|>"]
    assert second.input_ids == encoder.tokenizer.apply_chat_template(TURNS, return_dict=False)


def test_what_is_too_long_is_cut_and_counted(folders, chat, monkeypatch, tmp_path, capsys):
    encoder = ChatEncoder(make_tokenizer(CHATML))
    sets = [
        question("a" * 5, "b" * 90),
        question("a" * 90, "b"),
        question("a", "b"),
    ]
    encoded = encoder.encode(sets, 40)
    assert [len(tokens) for tokens in encoded.examples] == [40, len(encoder.tokens(sets[2])[0])]
    assert (encoded.num_cut, encoded.num_dropped) == (1, 1)
    flags = ("--model", folders("qwen2"), "--data", chat, "--eval-data", chat, "--seq-len", 32, "--steps", 1)
    assert run(monkeypatch, *flags, "--output-dir", tmp_path / "out").code == 0
    assert re.search(r"training data: \d of \d examples are cut to --seq-len 32 tokens", capsys.readouterr().out)

"""Tiny models and tokenizers, made from configurations, and a file of conversations for them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from patrickstar.finetune import training
from patrickstar.finetune.main import main

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


def write_lines(path: Path, lines: list) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


FLAGS = ("--precision", "fp32", "--batch-size", "2", "--lr", "1e-2", "--samples", "1", "--sample-tokens", "4")


def run(monkeypatch: pytest.MonkeyPatch, *flags: object) -> SimpleNamespace:
    seen = SimpleNamespace(run=None, task=None)
    train = training.train

    def watched(model_func, task, *rest):
        seen.task = task
        seen.run = train(model_func, task, *rest)
        return seen.run

    with monkeypatch.context() as patch:
        patch.setattr(training, "train", watched)
        seen.code = main([str(flag) for flag in (*FLAGS, *flags)])
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

"""Fine-tunes a causal language model on conversations: data, model, training, answers before and after."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import LlamaForCausalLM

from patrickstar.command.flags import UsageError
from patrickstar.finetune import flags, training
from patrickstar.finetune.arguments import LONGEST_ROW
from patrickstar.finetune.batches import Batch, num_rows, unigram_score
from patrickstar.finetune.conversations import Conversation, write_conversations
from patrickstar.finetune.encoding import ChatEncoder, Encoded, model_inputs, packed_rows, padded_rows
from patrickstar.finetune.kernels import with_kernels
from patrickstar.finetune.models import (
    check_packing,
    compute_dtype,
    folder_identity,
    load_config,
    load_frozen_model,
    load_model,
    load_tokenizer,
    max_positions,
    print_answers,
    with_lora,
)
from patrickstar.finetune.proof import be_deterministic, compare_with_unbounded
from patrickstar.finetune.ranks import Ranks, joined_ranks
from patrickstar.finetune.reporting import print_run, save_curves
from patrickstar.finetune.small_llama import small_llama, train_tokenizer
from patrickstar.finetune.tasks import Output, Task
from patrickstar.finetune.usage import PROGRAM, python_command
from patrickstar.integrations.weights import adapter_state


def set_seq_len(args: argparse.Namespace, config: Any) -> None:
    """Sets ``args.seq_len`` to a length that the model accepts.

    Raises:
        UsageError: the flags request more.
    """
    most = max_positions(config)
    if args.seq_len is None:
        args.seq_len = min(LONGEST_ROW, most or LONGEST_ROW)
    elif most is not None and args.seq_len > most:
        raise UsageError(f"--seq-len is {args.seq_len}, the model takes rows of {most} tokens; give at most that")


def make_rows(encoded: Encoded, tokenizer: Any, args: argparse.Namespace, vocab_size: int, name: str) -> Batch:
    """The rows of a set of examples.

    Raises:
        UsageError: none has an answer, or one has a token that the model does not know.
    """
    if not encoded.examples:
        raise UsageError(f"{name}: no answer begins within --seq-len {args.seq_len} tokens; give more")
    largest = max(max(tokens.input_ids) for tokens in encoded.examples)
    if largest >= vocab_size:
        raise UsageError(
            f"{name} has token {largest} ({tokenizer.decode([largest])!r}), the model knows {vocab_size} tokens; "
            "--model must have the tokenizer of its model"
        )
    pad_id = tokenizer.pad_token_id or 0
    pad_id = pad_id if pad_id < vocab_size else 0
    if args.packing:
        return packed_rows(encoded.examples, args.seq_len, pad_id)
    return padded_rows(encoded.examples, pad_id)


def make_task(
    encoder: ChatEncoder,
    sets: tuple[list[Conversation], list[Conversation]],
    args: argparse.Namespace,
    config: Any,
    ranks: Ranks,
) -> Task:
    """Answering; the trivial answer is the unigram distribution of answers' tokens."""
    vocab_size = config.get_text_config().vocab_size
    names = "training data", "held-out data"
    encoded = [encoder.encode(conversations, args.seq_len) for conversations in sets]
    train, held_out = (
        make_rows(each, encoder.tokenizer, args, vocab_size, name) for each, name in zip(encoded, names, strict=True)
    )
    for each, name, rows in zip(encoded, names, (train, held_out), strict=True):
        answers = sum(tokens.num_answer_tokens for tokens in each.examples)
        ranks.say(f"{name}: {len(each.examples)} examples in {num_rows(rows)} rows, {answers} tokens of answers")
        for remark in each.remarks(name, args.seq_len):
            ranks.say(remark)
    asked = [each for each in sets[1] if len(encoder.prompt(each)) < args.seq_len][: args.samples]

    def ask(model: nn.Module, when: str) -> None:
        if asked:
            ranks.say(f"answers {when} the training (held-out questions)")
            print_answers(model, encoder, asked, args.sample_tokens, ranks)

    def before(model: nn.Module) -> None:
        if args.packing:
            check_packing(model, vocab_size, args.precision)
        ask(model, "before")

    return Task(
        name="instruction tuning",
        train=train,
        held_out=held_out,
        shift=True,
        collate=model_inputs,
        options={"use_cache": False},  # with a cache, transformers would not find the starts of packed conversations
        before=before,
        after=lambda model: ask(model, "after"),
        baseline_name="unigram baseline",
        baseline=unigram_score(train["labels"], held_out["labels"]),
        identity=_identity(args, config),
    )


def _identity(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    """The model and the method, which must be equal when the run is resumed."""
    same = {
        "--model": folder_identity(args.model, config) if args.model else f"none: {args.layers} x {args.hidden}",
        "--method": args.method,
        "--kernels": args.kernels,
        "--packing": args.packing,
        "--seq-len": args.seq_len,
    }
    return same | ({"--lora-rank": args.lora_rank, "--quantization": args.quantization} if args.lora else {})


def model_builder(args: argparse.Namespace, config: Any) -> Callable[[], nn.Module]:
    """A function that builds the model to train."""

    def build() -> nn.Module:
        if args.model is None:
            base: nn.Module = LlamaForCausalLM(config)
        elif args.lora:
            base = load_frozen_model(args.model, args.precision, args.quantization)
        else:
            base = load_model(args.model)
        base = training.with_checkpointing(with_kernels(base, args.kernels), args)
        return with_lora(base, args.lora_rank) if args.lora else base

    return build


def model_saver(args: argparse.Namespace, tokenizer: Any, ranks: Ranks) -> Callable[[Any], Path]:
    """A function that writes the trained model, or its adapters, with the tokenizer."""
    folder = flags.saved_model(args)
    if not args.lora:
        return training.exporter(folder, tokenizer, ranks, dtype=compute_dtype(args.precision))

    def save(model: Any) -> Path:
        adapters = adapter_state(model)  # without a state dict of the base
        model.save_pretrained(folder, is_main_process=ranks.is_first, state_dict=adapters)
        if ranks.is_first:
            tokenizer.save_pretrained(folder)
        return folder

    return save


def print_next_commands(args: argparse.Namespace, chat: Path) -> None:
    """Prints commands that follow the demo, ready to paste."""
    model = flags.saved_model(args)
    asked = (
        f'from transformers import pipeline; answer = pipeline("text-generation", "{model}"); '
        'asked = {"role": "user", "content": "What does `math.sqrt` do?"}; '
        'said = answer([asked], max_new_tokens=40, do_sample=False)[0]; print(said["generated_text"][-1]["content"])'
    )
    own = ["--model", model, "--data", chat, "--output-dir", args.output_dir / "next", "--overwrite"]
    plan = ["--model", model, "--seq-len", args.seq_len, "--batch-size", args.batch_size]
    plan += ["--precision", args.precision, "--device-memory", "1GiB", "--host-memory", "8GiB"]
    print("\nNext:")
    print(f"# ask the model\n{python_command('-c', asked)}")
    print("# tune any folder of Hugging Face's on your own conversations; here the demo's model on the demo's data")
    print(python_command(*PROGRAM, *own, "--lora", "--epochs", 1))
    print(f"# will a model fit, and how fast is a step?\n{python_command('-m', 'patrickstar', 'plan', *plan)}")
    print(f"# all flags\n{python_command(*PROGRAM, '--help')}")


def tune(args: argparse.Namespace, sets: tuple[list[Conversation], list[Conversation]]) -> int:
    """Trains on all ranks; returns the exit code."""
    if args.demo:
        be_deterministic()
    with joined_ranks() as ranks:
        return _tune(args, sets, ranks)


def _tune(args: argparse.Namespace, sets: tuple[list[Conversation], list[Conversation]], ranks: Ranks) -> int:
    """Trains on the first of ``sets``, reports and, with ``--demo``, trains again; returns the exit code."""
    if args.model is None:
        tokenizer = train_tokenizer(sets[0], args.vocab_size)
        config = small_llama(tokenizer, hidden=args.hidden, layers=args.layers, seq_len=args.seq_len)
    else:
        config = load_config(args.model)
        tokenizer = load_tokenizer(args.model)
    set_seq_len(args, config)
    encoder = ChatEncoder(tokenizer)
    if encoder.uses_default_template:
        ranks.say("the tokenizer has no chat template: conversations are written as '### User:', '### Assistant:'")
    task = make_task(encoder, sets, args, config, ranks)
    output = Output(
        checkpoints=flags.checkpoints(args), resume=args.resume, save_model=model_saver(args, tokenizer, ranks)
    )
    build = model_builder(args, config)
    run = training.train(build, task, args, ranks, output)
    print_run(run, task, args, ranks)
    save_curves(run, task, args.output_dir / "curves.png", ranks)
    if not args.demo:
        return 0
    chat = args.output_dir / "chat.jsonl"
    if ranks.is_first:
        write_conversations(sets[0], chat)
    if not compare_with_unbounded(run, task, args, build, ranks):
        return 1
    if ranks.is_first:
        print_next_commands(args, chat)
    return 0

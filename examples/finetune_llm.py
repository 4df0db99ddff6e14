"""Fine-tunes a Hugging Face causal language model on your conversations, within a device memory budget.

Usage:
    python examples/finetune_llm.py --model FOLDER --data chat.jsonl                   # all of its parameters
    python examples/finetune_llm.py --model FOLDER --data chat.jsonl --lora --packing --device-memory 8GiB
    python examples/finetune_llm.py                   # a small Llama from nothing, on questions about Python
    python examples/finetune_llm.py --demo            # with and without a budget: the same losses, bit by bit
    torchrun --nproc_per_node=2 examples/finetune_llm.py --model FOLDER --data chat.jsonl

FOLDER is written by save_pretrained: Llama, Qwen, Mistral, Gemma, GPT-2 and others. Nothing is downloaded. A line of
chat.jsonl is {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]} or {"prompt": "…",
"answer": "…"}; only answers are learned. See docs/guides/finetune_llm.md.

Ctrl-C finishes the step, saves the run and prints the command that resumes it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command
import common
import flags
import torch
from command import UsageError, python_command, shown_path
from common import Batch, Output, Task
from llm.conversations import Conversation, read_conversations, write_conversations
from llm.encoding import ChatEncoder, Encoded, model_inputs, packed_rows, padded_rows
from llm.models import (
    check_folder,
    check_packing,
    compute_dtype,
    load_config,
    load_frozen_model,
    load_model,
    load_tokenizer,
    max_positions,
    print_answers,
    with_lora,
)
from llm.python_questions import python_questions, small_llama, train_tokenizer
from proof import be_deterministic, compare_with_unbounded
from ranks import Ranks, joined_ranks
from torch import nn
from transformers import LlamaForCausalLM

from patrickstar.integrations.weights import adapter_state

SMALL = {"seq_len": 128, "batch_size": 2, "packing": True, "steps": 800, "lr": 2e-3}
CPU_DEMO = SMALL | {"device_memory": "40MiB"}
RANKS_DEMO = CPU_DEMO | {"device_memory": "24MiB", "batch_size": 1, "hidden": 128, "steps": 60}
GPU_DEMO = {"seq_len": 256, "batch_size": 8, "packing": True, "steps": 240, "lr": 4e-4, "checkpointing": True}
GPU_DEMO |= {"hidden": 1024, "layers": 24, "vocab_size": 2048, "device_memory": "2GiB"}

LONGEST_ROW = 512
"""Tokens of a row, if the flags do not set it and the model accepts as many."""


def make_parser() -> flags.Parser:
    """All flags."""
    parser = flags.Parser(__doc__)
    parser.add_argument("--demo", action="store_true", help="train with and without a budget and compare")
    model = parser.add_argument_group("model")
    model.add_argument("--model", type=Path, metavar="FOLDER", help="a local folder (default: a small Llama)")
    model.add_argument("--lora", action="store_true", help="train adapters only (PEFT's LoRA on all linear layers)")
    model.add_argument("--lora-rank", type=int, default=16, metavar="N", help="of the adapters")
    model.add_argument(
        "--quantization",
        choices=("nf4", "int8"),
        help="with --lora: what the frozen model is stored in (default: 16 bits)",
    )
    model.add_argument("--hidden", type=int, default=256, metavar="N", help="of the small Llama")
    model.add_argument("--layers", type=int, default=4, metavar="N", help="of the small Llama")
    model.add_argument("--vocab-size", type=int, default=1024, metavar="N", help="of the small Llama's tokenizer")
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, metavar="FILE", help="JSON lines (default: questions about Python)")
    data.add_argument("--eval-data", type=Path, metavar="FILE", help="held-out JSON lines (default: a share of --data)")
    data.add_argument("--eval-share", type=float, default=0.05, help="of --data that is held out")
    data.add_argument(
        "--seq-len",
        type=int,
        metavar="N",
        help=f"tokens per row (default: {LONGEST_ROW}, or what the model takes); what is longer is cut",
    )
    data.add_argument("--packing", action="store_true", help="put several conversations into one row, each by itself")
    data.add_argument("--samples", type=int, default=3, metavar="N", help="questions asked before and after")
    data.add_argument("--sample-tokens", type=int, default=40, metavar="N", help="of an answer to one of them")
    flags.add_training_arguments(parser, output="llm-output")
    parser.set_defaults(lr=None)
    return parser


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; ``--demo``, and a missing ``--model``, change the defaults, other flags still apply.

    Raises:
        UsageError: it is wrong.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.model is None:
        parser.set_defaults(**SMALL)
    if args.demo:
        several = int(os.environ.get("WORLD_SIZE") or 1) > 1
        parser.set_defaults(output_dir=Path("demo-output"))
        parser.set_defaults(**(GPU_DEMO if torch.cuda.is_available() else RANKS_DEMO if several else CPU_DEMO))
    args = parser.parse_args(argv)
    if args.lr is None:
        args.lr = 2e-4 if args.lora else 1e-5
    args.overwrite |= args.demo and not args.resume
    for flag, value in {"--samples": args.samples, "--sample-tokens": args.sample_tokens - 1}.items():
        if value < 0:
            raise UsageError(f"{flag} is {value}; give 0 or more, and 1 or more tokens")
    for flag in ("lora_rank", "hidden", "layers", "vocab_size"):
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}; give 1 or more")
    if not 0 < args.eval_share < 1:
        raise UsageError(f"--eval-share is {args.eval_share}; give more than 0 and less than 1")
    if args.lora and args.model is None:
        raise UsageError("--lora adapts a model that has learned something; give one with --model")
    if args.quantization and not args.lora:
        raise UsageError(f"--quantization {args.quantization} stores a frozen model in fewer bits; give --lora too")
    if args.eval_data is not None and args.data is None:
        raise UsageError("--eval-data is held out of --data; give both")
    if args.model is not None:
        check_folder(args.model)
    return args


def read_data(args: argparse.Namespace) -> tuple[list[Conversation], list[Conversation]]:
    """Conversations for training, and held-out ones.

    Raises:
        UsageError: a line is malformed, or nothing is left for training.
    """
    if args.data is None:
        return python_questions(args.seed)
    found = read_conversations(args.data)
    if args.eval_data is not None:
        return found, read_conversations(args.eval_data)
    if len(found) < 2:
        raise UsageError(f"{args.data} has one conversation, of which none can be held out; give more, or --eval-data")
    random.Random(args.seed).shuffle(found)
    cut = max(1, round(args.eval_share * len(found)))
    return found[cut:], found[:cut]


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
    vocab_size: int,
    ranks: Ranks,
) -> Task:
    """Answering; the trivial answer is the unigram distribution of answers' tokens."""
    names = "training data", "held-out data"
    encoded = [encoder.encode(conversations, args.seq_len) for conversations in sets]
    train, held_out = (
        make_rows(each, encoder.tokenizer, args, vocab_size, name) for each, name in zip(encoded, names, strict=True)
    )
    for each, name, rows in zip(encoded, names, (train, held_out), strict=True):
        answers = sum(tokens.num_answer_tokens for tokens in each.examples)
        ranks.say(f"{name}: {len(each.examples)} examples in {common.num_rows(rows)} rows, {answers} tokens of answers")
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
        baseline=common.unigram_score(train["labels"], held_out["labels"]),
    )


def model_builder(args: argparse.Namespace, config: Any) -> Callable[[], nn.Module]:
    """A function that builds the model to train."""

    def build() -> nn.Module:
        if args.model is None:
            return common.with_checkpointing(LlamaForCausalLM(config), args)
        if args.lora:
            base = load_frozen_model(args.model, args.precision, args.quantization)
            return with_lora(common.with_checkpointing(base, args), args.lora_rank)
        return common.with_checkpointing(load_model(args.model), args)

    return build


def model_saver(args: argparse.Namespace, tokenizer: Any, ranks: Ranks) -> Callable[[Any], Path]:
    """A function that writes the trained model, or its adapters, with the tokenizer."""
    folder = flags.saved_model(args)
    if not args.lora:
        return common.exporter(folder, tokenizer, ranks, dtype=compute_dtype(args.precision))

    def save(model: Any) -> Path:
        adapters = adapter_state(model)  # without a state dict of the base
        model.save_pretrained(folder, is_main_process=ranks.is_first, state_dict=adapters)
        if ranks.is_first:
            tokenizer.save_pretrained(folder)
        return folder

    return save


def print_next_commands(args: argparse.Namespace, chat: Path) -> None:
    """Prints commands that follow the demo, ready to paste."""
    model, script = flags.saved_model(args), shown_path(__file__)
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
    print(python_command(script, *own, "--lora", "--epochs", 1))
    print(f"# will a model fit, and how fast is a step?\n{python_command('-m', 'patrickstar.plan', *plan)}")
    print(f"# all flags\n{python_command(script, '--help')}")


def run_example(args: argparse.Namespace, sets: tuple[list[Conversation], list[Conversation]], ranks: Ranks) -> int:
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
    task = make_task(encoder, sets, args, config.get_text_config().vocab_size, ranks)
    output = Output(
        checkpoints=flags.checkpoints(args), resume=args.resume, save_model=model_saver(args, tokenizer, ranks)
    )
    build = model_builder(args, config)
    run = common.train(build, task, args, ranks, output)
    common.print_run(run, task, args, ranks)
    common.save_curves(run, task, args.output_dir / "curves.png", ranks)
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


def main(argv: list[str]) -> int:
    """Runs the example; returns the exit code."""

    def body() -> int:
        args = parse_arguments(argv)
        sets = read_data(args)  # finds a malformed line before anything is made
        flags.check_arguments(args)
        if args.demo:
            be_deterministic()
        with joined_ranks() as ranks:
            return run_example(args, sets, ranks)

    return command.run_command(body, __file__, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

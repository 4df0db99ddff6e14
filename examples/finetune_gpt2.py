"""Trains or fine-tunes GPT-2 on text within a device memory budget. Nothing is downloaded.

Usage:
    python examples/finetune_gpt2.py                  # a small GPT-2 on the Python reference, from scratch
    python examples/finetune_gpt2.py --demo           # with and without a budget: the same losses, bit by bit
    python examples/finetune_gpt2.py --model-size gpt2-xl --device-memory 8GiB --checkpointing --text book.txt
    python examples/finetune_gpt2.py --pretrained FOLDER --text book.txt --lr 5e-5     # a local Hugging Face folder
    torchrun --nproc_per_node=2 examples/finetune_gpt2.py --demo                       # the same by two processes

Ctrl-C finishes the step, saves the run and prints the command that resumes it.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import sys
from pathlib import Path

import environment  # noqa: F401 (first)
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from patrickstar.command.flags import UsageError
from patrickstar.finetune import flags, training
from patrickstar.finetune.batches import Batch, unigram_score
from patrickstar.finetune.proof import be_deterministic, compare_with_unbounded
from patrickstar.finetune.ranks import Ranks, joined_ranks
from patrickstar.finetune.reporting import print_run, save_curves
from patrickstar.finetune.tasks import Output, Task
from patrickstar.finetune.usage import run_command, shown_path

END = "<|endoftext|>"
HELD_OUT_SHARE = 0.05

MODEL_SIZES = {  # hidden, layers, heads
    "tiny": (64, 2, 2),
    "small": (384, 6, 6),
    "base": (512, 8, 8),
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
    "4b": (3072, 36, 24),
}
CPU_DEMO = {"device_memory": "96MiB", "vocab_size": 512, "batch_size": 2, "steps": 200, "lr": 4e-4}
RANKS_DEMO = {  # several processes on the cores of one: less of everything
    "device_memory": "24MiB",
    "vocab_size": 512,
    "batch_size": 1,
    "steps": 60,
    "lr": 1e-3,
    "hidden": 256,
    "layers": 4,
    "heads": 4,
}
GPU_DEMO = {"device_memory": "2GiB", "model_size": "gpt2-medium", "batch_size": 8, "steps": 240, "lr": 3e-4}


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; ``--demo`` changes the defaults, other flags still apply."""
    parser = flags.Parser(__doc__)
    parser.add_argument("--demo", action="store_true", help="train with and without a budget and compare")
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="default: Python's reference")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per example")
    model = parser.add_argument_group("model")
    model.add_argument("--model-size", choices=MODEL_SIZES, default="small")
    model.add_argument("--hidden", type=int, help="instead of --model-size's; likewise --layers, --heads")
    model.add_argument("--layers", type=int)
    model.add_argument("--heads", type=int)
    model.add_argument("--vocab-size", type=int, default=2048, help="of the tokenizer trained on the text")
    model.add_argument("--pretrained", type=Path, metavar="FOLDER", help="a local folder: model and tokenizer")
    model.add_argument("--dropout", type=float, default=0.0, help="in every place where the model has one")
    flags.add_training_arguments(parser, output="gpt2-output")
    flags.add_export_argument(parser)
    parser.set_defaults(batch_size=4)
    if "--demo" in argv:
        several = int(os.environ.get("WORLD_SIZE") or 1) > 1
        parser.set_defaults(output_dir=Path("demo-output"))
        parser.set_defaults(**(GPU_DEMO if torch.cuda.is_available() else RANKS_DEMO if several else CPU_DEMO))
    args = parser.parse_args(argv)
    for path in args.text or []:
        if not path.is_file():
            raise UsageError(f"--text {path} is no file; give text files")
    if args.pretrained and not (args.pretrained / "config.json").is_file():
        raise UsageError(f"--pretrained {args.pretrained} has no config.json; give a folder that save_pretrained wrote")
    args.overwrite |= args.demo and not args.resume
    flags.check_arguments(args)
    return args


def python_reference() -> str:
    """The language reference that every CPython includes for ``help()``, without repeated paragraphs."""
    topics = pydoc_data.topics.topics
    paragraphs = [paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n")]
    return "\n\n".join({" ".join(paragraph.split()): paragraph for paragraph in paragraphs}.values())


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: GPT-2's, but small."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)


def make_rows(tokenizer: PreTrainedTokenizerBase, text: str, seq_len: int) -> Batch:
    """Cuts the text into examples of ``seq_len`` tokens; an incomplete last one is dropped."""
    tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    if len(tokens) < seq_len:
        raise UsageError(
            f"a part of the text has {len(tokens)} tokens, --seq-len is {seq_len}; lower it or give more text"
        )
    rows = tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len)
    return {"input_ids": rows, "labels": rows}


def make_task(tokenizer: PreTrainedTokenizerBase, train_text: str, held_out_text: str, seq_len: int) -> Task:
    """Causal language modelling; the trivial answer is the unigram distribution."""
    train = make_rows(tokenizer, train_text, seq_len)
    held_out = make_rows(tokenizer, held_out_text, seq_len)
    baseline = unigram_score(train["labels"], held_out["labels"][:, 1:])
    return Task(
        name="language modelling",
        train=train,
        held_out=held_out,
        shift=True,
        baseline_name="unigram baseline",
        baseline=baseline,
    )


def build_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """A GPT-2 from ``--pretrained``, or from scratch."""
    options = {"use_cache": False, "resid_pdrop": args.dropout, "embd_pdrop": args.dropout, "attn_pdrop": args.dropout}
    if args.pretrained:
        model = GPT2LMHeadModel.from_pretrained(args.pretrained, dtype=torch.float32, **options)
    else:
        hidden, layers, heads = MODEL_SIZES[args.model_size]
        config = GPT2Config(
            n_embd=args.hidden or hidden,
            n_layer=args.layers or layers,
            n_head=args.heads or heads,
            vocab_size=len(tokenizer),
            n_positions=args.seq_len,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own function, in one kernel
            **options,
        )
        model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers' default too, but with a warning
    return training.with_checkpointing(model, args)


def run_example(args: argparse.Namespace, ranks: Ranks) -> int:
    """Trains, reports and, with ``--demo``, trains again; returns the exit code."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in args.text) if args.text else python_reference()
    cut = int(len(text) * (1 - HELD_OUT_SHARE))
    train_text, held_out_text = text[:cut], text[cut:]
    if args.pretrained:
        tokenizer = AutoTokenizer.from_pretrained(args.pretrained)
    else:
        tokenizer = train_tokenizer(train_text, args.vocab_size)
    task = make_task(tokenizer, train_text, held_out_text, args.seq_len)
    output = Output(
        checkpoints=flags.checkpoints(args),
        resume=args.resume,
        save_model=training.exporter(flags.saved_model(args), tokenizer, ranks) if args.save else None,
    )

    def build() -> nn.Module:
        return build_model(args, tokenizer)

    run = training.train(build, task, args, ranks, output)
    print_run(run, task, args, ranks)
    save_curves(run, task, args.output_dir / "gpt2-curves.png", ranks)
    if args.demo and not compare_with_unbounded(run, task, args, build, ranks):
        return 1
    return 0


def main(argv: list[str]) -> int:
    """Runs the example; returns the exit code."""

    def body() -> int:
        args = parse_arguments(argv)
        if args.demo:
            be_deterministic()
        with joined_ranks() as ranks:
            return run_example(args, ranks)

    return run_command(body, [shown_path(__file__)], argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

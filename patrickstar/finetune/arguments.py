"""The command line of ``patrickstar finetune``, and all that is checked before anything is loaded."""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import re
from collections.abc import Sequence
from pathlib import Path

from patrickstar.command.flags import UsageError, at_least_0, at_least_1, check_all
from patrickstar.finetune import flags
from patrickstar.finetune.conversations import Conversation, read_conversations
from patrickstar.finetune.kernels import check_kernels
from patrickstar.finetune.questions import python_questions
from patrickstar.finetune.settings import read_settings

DESCRIPTION = """Fine-tunes a Hugging Face causal language model on your conversations, within a device memory budget.

Usage:
    patrickstar finetune --model FOLDER --data chat.jsonl                              # all of its parameters
    patrickstar finetune --model FOLDER --data chat.jsonl --method qlora --packing --device-memory 8GiB
    patrickstar finetune --config run.yaml --lr 1e-4  # settings in a file: keys are flags' names, and flags win
    patrickstar finetune                              # a small Llama from nothing, on questions about Python
    patrickstar finetune --demo                       # with and without a budget: the same losses, bit by bit
    torchrun --nproc_per_node=2 -m patrickstar finetune --model FOLDER --data chat.jsonl

FOLDER is written by save_pretrained: Llama, Qwen, Mistral, Gemma, GPT-2 and others. Nothing is downloaded. A line of
chat.jsonl is {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]} or {"prompt": "…",
"answer": "…"}; only answers are learned. See docs/guides/finetune_llm.md.

Ctrl-C finishes the step, saves the run and prints the command that resumes it."""

METHODS = ("full", "lora", "qlora")
SMALL = {"seq_len": 128, "batch_size": 2, "packing": True, "steps": 320, "lr": 2e-3}
CPU_DEMO = SMALL | {"device_memory": "40MiB"}
RANKS_DEMO = CPU_DEMO | {"device_memory": "24MiB", "batch_size": 1, "hidden": 128, "steps": 60}
GPU_DEMO = {"seq_len": 256, "batch_size": 8, "packing": True, "steps": 240, "lr": 4e-4, "checkpointing": True}
GPU_DEMO |= {"hidden": 1024, "layers": 24, "vocab_size": 2048, "device_memory": "2GiB"}

LONGEST_ROW = 512
"""Tokens of a row, if the flags do not set it and the model accepts as many."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
NEEDED_PACKAGES = ("transformers", "tokenizers", "jinja2", "matplotlib", "tqdm")
"""Packages beside the required ones that every run needs."""


def make_parser(prog: str | None = None) -> flags.Parser:
    """All flags."""
    parser = flags.Parser(DESCRIPTION, prog)
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file with names of flags as keys")
    parser.add_argument("--demo", action="store_true", help="train with and without a budget and compare")
    model = parser.add_argument_group("model")
    model.add_argument("--model", type=Path, metavar="FOLDER", help="a local folder (default: a small Llama)")
    model.add_argument(
        "--method",
        choices=METHODS,
        default="full",
        help="train all parameters; adapters (PEFT's LoRA on all linear layers); adapters on a model in 4 bits",
    )
    model.add_argument("--lora", dest="method", action="store_const", const="lora", help="the same as --method lora")
    model.add_argument("--lora-rank", type=at_least_1, default=16, metavar="N", help="of the adapters")
    model.add_argument(
        "--quantization",
        choices=("nf4", "int8"),
        help="with adapters: what the frozen model is stored in (default: 16 bits, with --method qlora nf4)",
    )
    model.add_argument(
        "--kernels",
        choices=["liger"],
        help="Liger-Kernel's norms, rotary embeddings and MLPs: faster on GPUs, rounded differently (default: the "
        "model's own)",
    )
    small = {"type": at_least_1, "metavar": "N"}
    model.add_argument("--hidden", **small, default=256, help="of the small Llama")
    model.add_argument("--layers", **small, default=4, help="of the small Llama")
    model.add_argument("--vocab-size", **small, default=1024, help="of the small Llama's tokenizer")
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, metavar="FILE", help="JSON lines (default: questions about Python)")
    data.add_argument("--eval-data", type=Path, metavar="FILE", help="held-out JSON lines (default: a share of --data)")
    data.add_argument("--eval-share", type=_part, default=0.05, help="of --data that is held out")
    data.add_argument(
        "--seq-len",
        type=at_least_1,
        metavar="N",
        help=f"tokens per row (default: {LONGEST_ROW}, or what the model takes); what is longer is cut",
    )
    data.add_argument(
        "--packing",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="put several conversations into one row, each by itself",
    )
    data.add_argument("--samples", type=at_least_0, default=3, metavar="N", help="questions asked before and after")
    data.add_argument("--sample-tokens", type=at_least_1, default=40, metavar="N", help="of an answer to one of them")
    flags.add_training_arguments(parser, output="llm-output")
    parser.set_defaults(lr=None)
    return parser


def _part(text: str) -> float:
    value = flags.share(text)
    if value in (0, 1):
        raise argparse.ArgumentTypeError(f"it is {text!r}; give more than 0 and less than 1")
    return value


def parse_arguments(argv: Sequence[str], prog: str | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The settings of file and command line, and their mistakes.

    ``--demo``, and a missing ``--model``, change defaults; other flags still apply.

    Raises:
        UsageError: a flag has no value, or the file cannot be read.
    """
    parser = make_parser(prog)
    config = parser.parse_with_mistakes(argv)[0].config
    said, mistakes = ([], []) if config is None else read_settings(config, parser)
    words = [*said, *argv]
    args = parser.parse_with_mistakes(words)[0]
    if args.model is None:
        parser.set_defaults(**SMALL)
    if args.demo:
        parser.set_defaults(output_dir=Path("demo-output"), **_demo())
    args = parser.parse_with_mistakes(words)[0]
    mistakes += parser.parse_with_mistakes(argv)[1]  # those of the file are known
    if args.method == "qlora" and args.quantization is None:
        args.quantization = "nf4"
    if _epochs_count(argv, said):
        args.steps = None
    args.lora = args.method != "full"
    if args.lr is None:
        args.lr = 2e-4 if args.lora else 1e-5
    args.overwrite |= args.demo and not args.resume
    return args, mistakes


def _epochs_count(*sources: Sequence[str]) -> bool:
    """True if the first of ``sources`` that says how long to train says it in epochs alone."""
    for words in sources:
        given = {word.partition("=")[0] for word in words}
        if {"--steps", "--epochs"} & given:
            return "--steps" not in given
    return False


def _demo() -> dict[str, object]:
    import torch

    several = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return GPU_DEMO if torch.cuda.is_available() else RANKS_DEMO if several else CPU_DEMO


def checked_arguments(
    argv: Sequence[str], prog: str | None = None
) -> tuple[argparse.Namespace, tuple[list[Conversation], list[Conversation]]]:
    """The settings, and the conversations for training and held-out ones. Makes the output folder.

    Raises:
        UsageError: something is wrong; it has all mistakes.
    """
    args, mistakes = parse_arguments(argv, prog)
    sets: list[tuple[list[Conversation], list[Conversation]]] = []

    def report() -> None:
        if mistakes:
            raise UsageError(*mistakes)

    flags.check_arguments(
        args,
        report,
        lambda: _check_method(args),
        lambda: args.model is None or check_folder(args.model),
        lambda: check_kernels(args.kernels, args.model),
        lambda: sets.append(read_data(args)),
        lambda: _check_packages(args),
    )
    return args, sets[0]


def _check_method(args: argparse.Namespace) -> None:
    if args.lora and args.model is None:
        raise UsageError(f"--method {args.method} adapts a model that has learned something; give one with --model")
    if args.quantization and not args.lora:
        raise UsageError(f"--quantization {args.quantization} stores a frozen model in fewer bits; give --lora too")


def _check_packages(args: argparse.Namespace) -> None:
    missing = [name for name in (*NEEDED_PACKAGES, *["peft"] * args.lora) if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)}: not installed; pip install {' '.join(missing)}")


def check_folder(folder: Path) -> None:
    """Looks for what a model's folder needs, without loading anything.

    Raises:
        UsageError: something is missing.
    """
    if not folder.is_dir():
        name = str(folder)
        if _HUB_NAME.fullmatch(name) and not folder.parent.is_dir():
            here = f"models/{folder.name}"
            raise UsageError(
                f"--model {name} is no folder, and nothing is downloaded; if it is a name on Hugging Face's hub, give "
                f"--model {here} after: hf download {name} --local-dir {here}"
            )
        raise UsageError(f"--model {name} is no folder; give one that save_pretrained wrote (nothing is downloaded)")
    if not (folder / "config.json").is_file():
        raise UsageError(f"--model {folder} has no config.json; give a folder that save_pretrained wrote")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UsageError(f"--model {folder} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); copy the model's into it")
    from patrickstar.module.pretrained import SafetensorsFolder

    try:
        SafetensorsFolder(folder)  # looks at names and headers
    except ValueError as error:
        raise UsageError(f"--model {error}") from error


def read_data(args: argparse.Namespace) -> tuple[list[Conversation], list[Conversation]]:
    """Conversations for training, and held-out ones.

    Raises:
        UsageError: a line is malformed, or nothing is left for training.
    """
    if args.data is None:
        if args.eval_data is not None:
            raise UsageError("--eval-data is held out of --data; give both")
        return python_questions(args.seed)
    if args.eval_data is not None:
        read: list[list[Conversation]] = []
        files = args.data, args.eval_data
        check_all(*(lambda file=file: read.append(read_conversations(file)) for file in files))
        return read[0], read[1]
    found = read_conversations(args.data)
    if len(found) < 2:
        raise UsageError(f"{args.data} has one conversation, of which none can be held out; give more, or --eval-data")
    random.Random(args.seed).shuffle(found)
    cut = max(1, round(args.eval_share * len(found)))
    return found[cut:], found[:cut]

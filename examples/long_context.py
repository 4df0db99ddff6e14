"""Trains a small Llama on one long document with context parallelism: processes share each sequence.

Usage:
    python examples/long_context.py                                   # one process has the whole sequence
    torchrun --nproc_per_node=2 examples/long_context.py              # each of two has half of it: the same losses
    torchrun --nproc_per_node=2 examples/long_context.py --mode ulysses --text book.txt --seq-len 4096

The document is Python's reference (pydoc_data.topics), in a vocabulary of its own; nothing is downloaded. On a GPU a
sequence is the whole document. The runs differ in one line of the configuration, "sequence_parallel". Each run writes
its losses to OUTPUT_DIR and prints their difference from those of other numbers of processes there.
"""

from __future__ import annotations

import argparse
import json
import logging
import pydoc_data.topics
import sys
import time
from pathlib import Path
from typing import Any

import environment  # noqa: F401 (first)
import torch
from tokenizers import ByteLevelBPETokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from patrickstar.command.flags import UsageError
from patrickstar.config import SequenceMode
from patrickstar.finetune.flags import Parser
from patrickstar.finetune.ranks import Ranks, joined_ranks
from patrickstar.finetune.reporting import format_bytes
from patrickstar.finetune.usage import make_writable, run_command, shown_path
from patrickstar.planning.models import enable_checkpointing
from patrickstar.runtime import initialize_engine

logging.getLogger("patrickstar").setLevel(logging.WARNING)  # this script prints the run's start itself

CPU_TOKENS = 4096
"""Tokens of a sequence without a GPU: attention takes four times as long for twice as many."""

_SAME_RUN = ("text", "seq_len", "steps", "hidden", "layers", "heads", "vocab_size", "lr", "precision", "seed")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: it is wrong.
    """
    on_gpu = torch.cuda.is_available()
    parser = Parser(__doc__)
    parser.add_argument("--text", type=Path, metavar="FILE", help="the document (default: Python's reference)")
    parser.add_argument(
        "--seq-len", type=int, default=None if on_gpu else CPU_TOKENS, metavar="N",
        help="tokens of a sequence; each step takes the next ones (default on a GPU: the whole document)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, metavar="N", help="optimizer steps (default: once through the document, at least 8)"
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--hidden", type=int, default=1024 if on_gpu else 128, metavar="N", help="of the Llama")
    parser.add_argument("--layers", type=int, default=12 if on_gpu else 2, metavar="N", help="of the Llama")
    parser.add_argument("--heads", type=int, default=8 if on_gpu else 4, metavar="N", help="of the Llama")
    parser.add_argument("--vocab-size", type=int, default=2048, metavar="N", help="of the document's tokenizer")
    parser.add_argument("--mode", choices=[mode.value for mode in SequenceMode], default="auto", help="of attention")
    parser.add_argument("--device-memory", metavar="BYTES", help='device budget, such as "2GiB" (default: the device)')
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16" if on_gpu else "fp32")
    parser.add_argument("--seed", type=int, default=0, help="of the initial values")
    parser.add_argument("--output-dir", type=Path, default=Path("long-context-output"), metavar="FOLDER")
    args = parser.parse_args(argv)
    for flag in ("seq_len", "steps", "hidden", "layers", "heads"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise UsageError(f"--{flag.replace('_', '-')} is {value}; give 1 or more")
    if args.hidden % (2 * args.heads):
        raise UsageError(f"--hidden is {args.hidden}, --heads {args.heads}; give a multiple of twice the heads")
    if args.vocab_size < 300:
        raise UsageError(f"--vocab-size is {args.vocab_size}; give at least 300, 256 of which are bytes")
    if args.text is not None and not args.text.is_file():
        raise UsageError(f"--text {args.text} is no file; give a text file")
    make_writable("--output-dir", args.output_dir)
    return args


def read_document(args: argparse.Namespace) -> torch.Tensor:
    """The document's tokens, int64 [tokens], in a vocabulary trained on it.

    Raises:
        UsageError: it is shorter than a sequence.
    """
    if args.text is not None:
        text = args.text.read_text(encoding="utf-8", errors="replace")
    else:
        topics = pydoc_data.topics.topics
        text = "\n\n".join(topics[name] for name in sorted(topics))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=args.vocab_size, show_progress=False)
    tokens = torch.tensor(tokenizer.encode(text).ids)
    if len(tokens) < max(args.seq_len or 0, 2):
        raise UsageError(f"the document has {len(tokens)} tokens, --seq-len is {args.seq_len}; give less")
    return tokens


def build_model(args: argparse.Namespace, seq_len: int) -> nn.Module:
    """A small Llama with random weights."""
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=max(args.heads // 2, 1),
        max_position_embeddings=seq_len,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    enable_checkpointing(model)
    return model


def engine_config(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """The configuration of one process, plus one line."""
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr}},
        "gradient_clipping": 1.0,
        "device_memory": args.device_memory,
        "steps_per_print": 0,
    }
    if args.precision != "fp32":
        config[args.precision] = {"enabled": True}
    config["sequence_parallel"] = {"size": ranks.size, "mode": args.mode}
    return config


def train(args: argparse.Namespace, document: torch.Tensor, ranks: Ranks) -> list[float]:
    """The loss of each step. All processes are called with the same tokens.

    Raises:
        UsageError: the processes cannot share sequences so.
    """
    seq_len = args.seq_len or len(document)
    sequences = document[: len(document) // seq_len * seq_len].view(-1, seq_len)
    num_steps = args.steps or max(len(sequences), 8)
    torch.manual_seed(args.seed)
    try:
        model, optimizer = initialize_engine(lambda: build_model(args, seq_len), 0, engine_config(args, ranks))
    except ValueError as error:
        raise UsageError(error) from error
    losses, began = [], time.perf_counter()
    with model:
        count = model.report()["num_parameters"]
        ranks.say(
            f"{count / 1e6:.1f} M parameters, {args.precision}; {num_steps} steps of {seq_len} of the document's "
            f"{len(document)} tokens, {-(-seq_len // ranks.size)} on each of {ranks.size} processes"
        )
        model.train()
        for step in range(num_steps):
            tokens = sequences[step % len(sequences)].unsqueeze(0)
            loss = model(input_ids=tokens, labels=tokens).loss
            model.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            ranks.say(f"step {step + 1}: loss {losses[-1]:.7f}")
        seconds, peak = time.perf_counter() - began, model.report()["device_peak_bytes"]
    ranks.say(f"{num_steps * seq_len / seconds:.0f} tokens/s, device peak {format_bytes(peak)} on each process")
    return losses


def compare_runs(args: argparse.Namespace, losses: list[float], ranks: Ranks) -> None:
    """Writes the losses, and prints their difference from runs that differ only in the number of processes."""
    settings = {name: str(getattr(args, name)) for name in _SAME_RUN}
    path = args.output_dir / f"losses-{ranks.size}.json"
    path.write_text(json.dumps({"settings": settings, "losses": losses}), encoding="utf-8")
    for other in sorted(args.output_dir.glob("losses-*.json")):
        before = json.loads(other.read_text(encoding="utf-8"))
        if other == path or before["settings"] != settings:
            continue
        far = max(abs(one / two - 1) for one, two in zip(losses, before["losses"], strict=True))
        ranks.say(f"losses of {other}: the same to {far:.1e}")


def main(argv: list[str]) -> int:
    """Runs the example; returns the exit code."""

    def body() -> int:
        args = parse_arguments(argv)
        document = read_document(args)
        with joined_ranks() as ranks:
            losses = train(args, document, ranks)
            if ranks.is_first:
                compare_runs(args, losses, ranks)
        return 0

    return run_command(body, [shown_path(__file__)], argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

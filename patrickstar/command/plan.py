"""``patrickstar plan``: the command line. The planner is imported after all arguments are read."""

from __future__ import annotations

import argparse
import atexit
import gc
from collections.abc import Iterator, Sequence

from patrickstar.choices import Master, MatrixMode, Speculation
from patrickstar.command.flags import UsageError, run_reporting
from patrickstar.command.plan_flags import mesh_shape, plan_parser
from patrickstar.planning.gpus import DATA_SHEETS, precision_mistake
from patrickstar.planning.known_models import model_mistake

atexit.register(gc.freeze)  # else the interpreter's end searches all objects of PyTorch for cycles, for a second

_COLLECTIONS = (100_000, 20, 100)
"""Thresholds of the garbage collector. With Python's, it takes a seventh of an answer's time (docs/log.md)."""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m patrickstar.plan") -> int:
    """The command. Returns 0, 1 if the model does not fit, 2 if arguments are wrong."""
    args, mistakes = plan_parser(prog).parse_with_mistakes(arguments)
    mistakes += _contradictions(args)

    def answer() -> int:
        if mistakes:
            raise UsageError(*mistakes)
        usual = gc.get_threshold()
        gc.set_threshold(*_COLLECTIONS)
        try:
            from patrickstar.command.plan_answer import tell

            return tell(args)
        finally:
            gc.set_threshold(*usual)

    return run_reporting(prog, answer)


def _contradictions(args: argparse.Namespace) -> Iterator[str]:
    """Yields mistakes that no single flag shows."""
    mistake = model_mistake(args.model)
    if mistake is not None:
        yield mistake
    if args.margin_use_ratio > 1:
        yield f"--margin-use-ratio is {args.margin_use_ratio}; give at most 1"
    if args.longest and args.seq_len is not None:
        yield f"--longest finds the length, but --seq-len is {args.seq_len}; leave out one of them"
    beside = {
        "--longest": args.longest,
        "--batch-size": args.batch_size,
        "--gradient-accumulation": args.gradient_accumulation > 1,
    }
    given = [flag for flag, is_given in beside.items() if is_given]
    if args.tokens_per_step is not None and given:
        yield f"--tokens-per-step {args.tokens_per_step} is given with {', '.join(given)}; leave out one of them"
    speculation = Speculation(args.speculation)
    if speculation is Speculation.COMMIT and (args.gradient_accumulation > 1 or args.clip > 0):
        yield "--speculation commit updates in every backward, for good; leave out --gradient-accumulation and --clip"
    if args.master == Master.STOCHASTIC.value and (speculation is Speculation.ALWAYS or args.precision != "bf16"):
        yield "--master stochastic needs --precision bf16 and not --speculation always; change these, or leave it out"
    mistake = precision_mistake(args.precision, args.gpu, DATA_SHEETS[args.gpu].precisions)
    if mistake is not None:
        yield mistake
    if args.fp8 is not None and args.precision != "bf16":
        yield f"--fp8 is {args.fp8}, and --precision is {args.precision}; FP8 needs --precision bf16"
    if args.fp8 is not None and not DATA_SHEETS[args.gpu].has_float8:
        yield f"--fp8 is {args.fp8}, but {args.gpu} is no Ada, Hopper or Blackwell GPU, which multiply so; leave it out"
    yield from _image_contradictions(args)
    yield from _mesh_contradictions(args)
    if args.expert_parallel > 1 and (args.tensor_parallel is not None or args.sequence_parallel > 1):
        yield (
            f"--expert-parallel is {args.expert_parallel}, which does not go together with --tensor-parallel or "
            "--sequence-parallel yet; leave one of them out"
        )


def _image_contradictions(args: argparse.Namespace) -> Iterator[str]:
    if not args.images:
        if args.image_size is not None:
            yield "--image-size is given, but no images; give --images too"
        return
    beside = {
        "--longest": args.longest,
        "--sequence-parallel": args.sequence_parallel > 1,
        "--tensor-parallel": args.tensor_parallel is not None,
    }
    others = [flag for flag, is_given in beside.items() if is_given]
    if others:
        yield f"--images is given with {', '.join(others)}, which is for text alone; leave out one of them"


def _mesh_contradictions(args: argparse.Namespace) -> Iterator[str]:
    text, mode = args.tensor_parallel, MatrixMode(args.tensor_mode)
    if text is None:
        if mode is not MatrixMode.AUTO:
            yield f"--tensor-mode is {mode.value}, but nothing is divided; give --tensor-parallel too"
        return
    beside = {"--lora-rank": args.lora_rank > 0, "--quantization": args.quantization is not None, "--fp8": args.fp8}
    others = [flag for flag, is_given in beside.items() if is_given]
    if others:
        yield (
            f"--tensor-parallel is given with {', '.join(others)}, which is planned for whole matrices alone; leave "
            "out one of them"
        )
    if args.sequence_parallel > 1 and mode is MatrixMode.ONE:
        yield (
            f"--tensor-mode is 1d, which divides sequences itself, and --sequence-parallel is "
            f"{args.sequence_parallel}; give --tensor-mode 2d, or leave out --sequence-parallel"
        )
    shape = mesh_shape(text)
    if shape is None:
        if args.longest:
            yield (
                f"--tensor-parallel is {text}, whose mesh follows from the length that --longest looks for; give "
                "ROWSxCOLUMNS, or --seq-len"
            )
    elif mode is MatrixMode.ONE and shape[0] > 1:
        yield (
            f"--tensor-parallel is {text}, but one dimension has no rows; give {shape[0] * shape[1]}, or leave out "
            "--tensor-mode 1d"
        )

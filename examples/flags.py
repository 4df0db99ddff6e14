"""The command line of the fine-tuning examples, and the PatrickStar configuration made from it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

import torch
from command import UsageError, prepare_output

from patrickstar.checkpoint import latest_tag
from patrickstar.config import parse_config


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows each flag's default, if it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if "(default" in text or action.default in (None, False, argparse.SUPPRESS):
            return text
        return f"{text} (default: %(default)s)".lstrip()


class Parser(argparse.ArgumentParser):
    """Raises UsageError for wrong arguments, so that one rank prints it."""

    def __init__(self, description: str | None):
        super().__init__(description=description, formatter_class=HelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(message)


def add_training_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    """Adds the flags common to all examples; ``output`` is the default output folder."""
    _add_memory_arguments(parser.add_argument_group("memory, of each rank"))
    _add_optimization_arguments(parser.add_argument_group("training"))
    _add_output_arguments(parser.add_argument_group("output"), output)


def _add_memory_arguments(memory: Any) -> None:
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    memory.add_argument("--device-memory", metavar="BYTES", help='device budget, such as "2GiB" (default: the device)')
    memory.add_argument("--host-memory", metavar="BYTES", help="host budget for model data (default: most of it)")
    memory.add_argument("--chunk-size", type=int, metavar="N", help="elements per chunk (default: the library's)")
    memory.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    memory.add_argument(
        "--states", choices=["fp32", "bf16", "8bit"], default="fp32", help="what momentum and variance are stored in"
    )
    memory.add_argument(
        "--master",
        choices=["exact", "stochastic"],
        default="exact",
        help="what bf16 parameters are updated from: float32 masters, or themselves, rounded stochastically",
    )
    memory.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default=precision, help="of the computation")


def _add_optimization_arguments(training: Any) -> None:
    training.add_argument("--epochs", type=float, default=3.0, help="passes over the data")
    training.add_argument("--steps", type=int, metavar="N", help="optimizer steps, instead of --epochs")
    training.add_argument("--batch-size", type=int, default=8, metavar="N", help="examples per forward and rank")
    training.add_argument(
        "--gradient-accumulation",
        "--accumulation",
        dest="accumulation",
        type=int,
        default=1,
        metavar="N",
        help="forwards and backwards per optimizer step",
    )
    training.add_argument("--optimizer", choices=["AdamW", "Lion"], default="AdamW", help="Lion wants a lower rate")
    training.add_argument("--lr", type=float, default=5e-4, help="the highest learning rate, after the warm-up")
    training.add_argument("--warmup", type=float, default=0.1, help="share of the steps in which the rate rises")
    training.add_argument("--weight-decay", type=float, default=0.01, help="not for biases and norms")
    training.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    training.add_argument("--seed", type=int, default=0, help="of order, initial values and dropout")


def _add_output_arguments(group: Any, output: str) -> None:
    group.add_argument(
        "--output-dir",
        "--output",
        type=Path,
        default=Path(output),
        metavar="FOLDER",
        help="for all that the run writes; must be empty without the next two flags",
    )
    group.add_argument("--resume", action="store_true", help="go on with the run whose checkpoint is in OUTPUT_DIR")
    group.add_argument("--overwrite", action="store_true", help="replace the run in OUTPUT_DIR")
    group.add_argument("--save-every", type=int, metavar="N", help="steps between two checkpoints (default: none)")


def add_export_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--save``, for examples that write their model only on request."""
    parser.add_argument("--save", action="store_true", help="also write OUTPUT_DIR/model, in Hugging Face's format")


def check_arguments(args: argparse.Namespace) -> None:
    """Checks flags before anything is loaded, and makes the output folder.

    Raises:
        UsageError: the flags request something that would fail later.
    """
    counts = {"--steps": args.steps, "--batch-size": args.batch_size, "--gradient-accumulation": args.accumulation}
    counts |= {"--save-every": args.save_every, "--chunk-size": args.chunk_size, "--seq-len": args.seq_len}
    for flag, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"{flag} is {count}; give 1 or more")
    for flag, value in {"--lr": args.lr, "--epochs": args.epochs}.items():
        if not 0 < value < float("inf"):
            raise UsageError(f"{flag} is {value}; give more than 0")
    if args.seed < 0:
        raise UsageError(f"--seed is {args.seed}; give 0 or more")
    if not 0 <= args.warmup <= 1:
        raise UsageError(f"--warmup is {args.warmup}; give a share of the steps, 0 to 1")
    if args.resume and args.overwrite:
        raise UsageError("--resume goes on with what --overwrite would remove; give one of them")
    try:
        parse_config(engine_config(args))
    except ValueError as error:
        raise UsageError(error) from error
    if args.resume and not any(map(latest_tag, (checkpoints(args), checkpoints(args, "lm")))):
        raise UsageError(
            f"--resume: {args.output_dir} has no checkpoint (Ctrl-C and --save-every save one); leave --resume out to "
            "start from nothing"
        )
    written = [args.output_dir / name for name in ("model", "adapter", "checkpoint", "checkpoint-lm")]
    prepare_output(args.output_dir, written, resume=args.resume, overwrite=args.overwrite)


def saved_model(args: argparse.Namespace) -> Path:
    """The folder for the trained model or adapter."""
    return args.output_dir / ("adapter" if getattr(args, "lora", False) else "model")


def checkpoints(args: argparse.Namespace, stage: str | None = None) -> Path:
    """The folder of checkpoints for ``--resume``; ``stage`` is an earlier training stage."""
    return args.output_dir / ("checkpoint" if stage is None else f"checkpoint-{stage}")


def engine_config(args: argparse.Namespace) -> dict:
    """The PatrickStar configuration for the flags."""
    betas = {"AdamW": (0.9, 0.95), "Lion": (0.9, 0.99)}[args.optimizer]
    config = {
        "optimizer": {
            "type": args.optimizer,
            "params": {"lr": args.lr, "betas": betas},
            "states": args.states,
            "master": args.master,
        },
        "gradient_clipping": args.clip,
        "device_memory": args.device_memory,
        "host_memory": args.host_memory,
        "steps_per_print": 0,  # the progress bar has the figures
    }
    if args.chunk_size is not None:
        config["default_chunk_size"] = args.chunk_size
    if args.precision != "fp32":
        config[args.precision] = {"enabled": True}
    return config

"""Flags of all fine-tuning runs, and the PatrickStar configuration made from them.

No PyTorch is imported before the arguments are read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from patrickstar.choices import Fp8Recipe
from patrickstar.command.flags import (
    CommandParser,
    UsageError,
    at_least_0,
    at_least_1,
    check_all,
    memory_size,
    not_negative,
    positive,
)
from patrickstar.finetune.usage import check_output, prepare_output

_AUTO = "auto"
_PICTURED_STEP = 6
"""Number of the demo's profiled step, from 1. The plan does not change any more by then."""


class Parser(CommandParser):
    """Raises UsageError with all wrong arguments, so that one rank prints them."""

    def __init__(self, description: str | None, prog: str | None = None):
        super().__init__(prog, description)

    def refuse(self, mistakes: Sequence[str]) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(*mistakes)


def share(text: str) -> float:
    """Flag type: a number from 0 to 1."""
    value = not_negative(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}; give a share, from 0 to 1")
    return value


def add_training_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    """Adds the flags common to all examples; ``output`` is the default output folder."""
    _add_memory_arguments(parser.add_argument_group("memory, of each rank"))
    _add_optimization_arguments(parser.add_argument_group("training"))
    _add_output_arguments(parser.add_argument_group("output"), output)


def _add_memory_arguments(memory: Any) -> None:
    sizes = {"type": memory_size, "metavar": "SIZE"}
    memory.add_argument("--device-memory", **sizes, help='device budget, such as "2GiB" (default: the device)')
    memory.add_argument("--host-memory", **sizes, help="host budget for model data (default: most of it)")
    memory.add_argument(
        "--chunk-size", type=at_least_1, metavar="N", help="elements per chunk (default: the library's)"
    )
    memory.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="recompute activations in backward",
    )
    memory.add_argument(
        "--states", choices=["fp32", "bf16", "8bit"], default="fp32", help="what momentum and variance are stored in"
    )
    memory.add_argument(
        "--master",
        choices=["exact", "stochastic"],
        default="exact",
        help="what bf16 parameters are updated from: float32 masters, or themselves, rounded stochastically",
    )
    memory.add_argument(
        "--precision",
        choices=["fp32", "bf16", "fp16"],
        help="of the computation (default: bf16; fp16 on GPUs without it, such as T4; fp32 without a GPU)",
    )
    memory.add_argument(
        "--fp8",
        choices=[recipe.value for recipe in Fp8Recipe],
        help="with bf16: linear layers multiply in 8 bits, faster on Ada, Hopper and Blackwell GPUs; so do experts on "
        "Hopper with rowwise (default: in bf16)",
    )


def _add_optimization_arguments(training: Any) -> None:
    training.add_argument("--epochs", type=positive, default=3.0, help="passes over the data")
    training.add_argument("--steps", type=at_least_1, metavar="N", help="optimizer steps, instead of --epochs")
    training.add_argument("--batch-size", type=at_least_1, default=8, metavar="N", help="examples per forward and rank")
    training.add_argument(
        "--gradient-accumulation",
        "--accumulation",
        dest="accumulation",
        type=at_least_1,
        default=1,
        metavar="N",
        help="forwards and backwards per optimizer step",
    )
    training.add_argument("--optimizer", choices=["AdamW", "Lion"], default="AdamW", help="Lion wants a lower rate")
    training.add_argument(
        "--lr", "--learning-rate", type=positive, default=5e-4, help="the highest one, after the warm-up"
    )
    training.add_argument("--warmup", type=share, default=0.1, help="share of the steps in which the rate rises")
    training.add_argument("--weight-decay", type=not_negative, default=0.01, help="not for biases and norms")
    training.add_argument("--clip", type=not_negative, default=1.0, help="largest gradient norm; 0: no clipping")
    training.add_argument("--seed", type=at_least_0, default=0, help="of order, initial values and dropout")


def _add_output_arguments(group: Any, output: str) -> None:
    group.add_argument(
        "--output-dir",
        "--output",
        type=Path,
        default=Path(output),
        metavar="FOLDER",
        help="for all that the run writes; must be empty without the next two flags",
    )
    group.add_argument(
        "--resume", nargs="?", const=True, default=False, choices=[True, _AUTO], metavar=_AUTO,
        help=f"go on with the run whose checkpoint is in OUTPUT_DIR; {_AUTO}: or begin, if there is none",
    )  # fmt: skip
    group.add_argument("--overwrite", action="store_true", help="replace the run in OUTPUT_DIR")
    group.add_argument(
        "--save-every", type=at_least_1, metavar="N", help="steps between two checkpoints (default: none)"
    )


def add_export_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--save``, for examples that write their model only on request."""
    parser.add_argument("--save", action="store_true", help="also write OUTPUT_DIR/model, in Hugging Face's format")


def check_arguments(args: argparse.Namespace, *checks: Callable[[], object]) -> None:
    """Checks flags before anything is loaded, sets the default precision, and makes the output folder.

    Args:
        args: the flags.
        checks: further ones.

    Raises:
        UsageError: the flags request something that would fail later; it has all mistakes.
    """
    args.precision = args.precision or default_precision()
    check_all(*checks, lambda: _check_config(args), lambda: _check_run(args))
    written = [args.output_dir / name for name in ("model", "adapter", "checkpoint", "checkpoint-lm")]
    prepare_output(args.output_dir, written, overwrite=args.overwrite)


def default_precision() -> str:
    """The fastest precision that is safe on this machine's devices."""
    import torch

    if not torch.cuda.is_available():
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _check_config(args: argparse.Namespace) -> None:
    from patrickstar.config import parse_config

    try:
        parse_config(engine_config(args))
    except ValueError as error:
        raise UsageError(error) from error


def _check_run(args: argparse.Namespace) -> None:
    from patrickstar.checkpoint import latest_tag

    if args.resume and args.overwrite:
        raise UsageError("--resume goes on with what --overwrite would remove; give one of them")
    if args.resume and not any(map(latest_tag, (checkpoints(args), checkpoints(args, "lm")))):
        if args.resume == _AUTO:  # the folder may have what a run wrote before its first checkpoint
            args.resume = False
            return
        raise UsageError(
            f"--resume: {args.output_dir} has no checkpoint (Ctrl-C and --save-every save one); leave --resume out to "
            "start from nothing"
        )
    check_output(args.output_dir, resume=args.resume, overwrite=args.overwrite)


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
    if args.fp8 is not None:
        config["fp8"] = {"recipe": args.fp8}
    if getattr(args, "demo", False) and args.device_memory is not None:
        config["profile"] = {"step": _PICTURED_STEP, "output": str(profile_folder(args))}
    return config


def profile_folder(args: argparse.Namespace) -> Path:
    """The folder of the demo's profile: a picture of chunks and activations within the budget."""
    return args.output_dir / "profile"

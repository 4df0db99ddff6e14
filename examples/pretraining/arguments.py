"""The command line of ``pretrain_gpt.py``; everything that can be checked before work starts is checked here."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint import latest_tag
from patrickstar.config import Speculation, States, parse_config
from patrickstar.finetune.flags import Parser

from .models import SIZES, ModelKind, ModelShape
from .options import TrainingOptions
from .tokens import MAX_TOKENS, least_tokens, map_tokens, text_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of one run of the script."""

    shape: ModelShape
    """The model."""
    training: TrainingOptions
    """How it is trained."""
    batch: int
    """Sequences per forward and rank."""
    steps: int
    """The step after which the run ends."""
    seed: int
    """Seed of initial values, data, order and dropout."""
    data: Path | None
    """Text, a folder of it, or token ids; None: random tokens."""
    tokenizer: str
    """``bpe`` or ``bytes``, for text."""
    save_tokens: Path | None
    """Where a text's tokens go."""
    save_folder: Path | None
    """The folder of checkpoints."""
    save_every: int | None
    """Steps between two of them; None: at the end only."""
    resume: bool
    """True to resume from the latest checkpoint."""
    export: Path | None
    """Where the weights go at the end."""
    save_plan: Path | None
    """Where the plan goes at the end."""
    log_every: int
    """Steps per line."""
    json: bool
    """True if lines are JSON."""

    @property
    def reads_text(self) -> bool:
        """True if ``data`` is text, not tokens."""
        return self.data is not None and self.data.suffix != ".bin"


def parse_arguments(argv: list[str], description: str | None) -> RunOptions:
    """The command line.

    Raises:
        UsageError: a flag has no such value.
        ValueError: something else is wrong with it.
    """
    args = _make_parser(description).parse_args(argv)
    options = RunOptions(
        shape=_shape(args),
        training=_training_options(args),
        **{
            field.name: getattr(args, field.name)
            for field in dataclasses.fields(RunOptions)
            if field.name not in ("shape", "training")
        },
    )
    _check_numbers(options)
    _check_data(options)
    _check_files(options)
    parse_config(options.training.engine_config())
    return options


def _make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = Parser(description)
    _add_model_arguments(parser.add_argument_group("model"))
    _add_data_arguments(parser.add_argument_group("data"))
    _add_training_arguments(parser.add_argument_group("training"))
    _add_memory_arguments(parser.add_argument_group("memory, of each rank"))
    _add_host_arguments(parser.add_argument_group("updates on the host"))
    _add_output_arguments(parser.add_argument_group("output"))
    return parser


def _add_model_arguments(model: Any) -> None:
    model.add_argument("--model", choices=[kind.value for kind in ModelKind], default="gpt")
    model.add_argument("--size", choices=SIZES, default="tiny", help="of which the flags below change parts")
    model.add_argument("--hidden", type=int, metavar="N")
    model.add_argument("--layers", type=int, metavar="N")
    model.add_argument("--heads", type=int, metavar="N")
    model.add_argument("--vocab", type=int, metavar="N", help="token ids; with --model bert the last one is the mask")
    model.add_argument("--seq-len", "--length", dest="length", type=int, metavar="N", help="tokens per sequence")
    model.add_argument("--dropout", type=float, default=0.0)
    model.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")


def _add_data_arguments(data: Any) -> None:
    data.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="a text file, a folder of *.txt, or a .bin of token ids (uint16); default: random tokens",
    )
    data.add_argument(
        "--tokenizer",
        choices=["bpe", "bytes"],
        default="bpe",
        help="of a text: a byte-level BPE trained on it, with --vocab ids, or its bytes (default: bpe)",
    )
    data.add_argument(
        "--save-tokens", type=Path, metavar="X.bin", help="write a text's tokens there, and X.tokenizer.json beside"
    )


def _add_training_arguments(training: Any) -> None:
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    training.add_argument("--steps", type=int, default=20, help="optimizer steps in all, those before --resume too")
    training.add_argument(
        "--batch-size", "--batch", dest="batch", type=int, default=4, metavar="N", help="sequences per forward and rank"
    )
    training.add_argument(
        "--gradient-accumulation",
        "--accumulate",
        dest="accumulate",
        type=int,
        default=1,
        metavar="N",
        help="forwards and backwards per step",
    )
    training.add_argument("--lr", type=float, default=3e-4, help="the highest learning rate")
    training.add_argument("--schedule", choices=["cosine", "constant"], default="cosine", help="after the warm-up")
    training.add_argument("--schedule-steps", type=int, metavar="N", help="of the cosine (default: --steps)")
    training.add_argument("--warmup", type=int, metavar="N", help="steps (default: a tenth of the schedule)")
    training.add_argument("--weight-decay", type=float, default=0.01, help="not for biases and norms")
    training.add_argument(
        "--clip",
        "--clipping",
        dest="clipping",
        type=float,
        default=1.0,
        metavar="NORM",
        help="largest gradient norm; 0: no clipping",
    )
    training.add_argument("--precision", choices=["bf16", "fp16", "fp32"], default=precision)
    training.add_argument("--seed", type=int, default=0)


def _add_memory_arguments(memory: Any) -> None:
    memory.add_argument(
        "--device-memory",
        "--gpu-mem",
        dest="gpu_mem",
        metavar="BYTES",
        help='device budget, such as "24GiB" (default: most of it)',
    )
    memory.add_argument(
        "--host-memory",
        "--host-mem",
        dest="host_mem",
        metavar="BYTES",
        help="host budget for model data (default: most of its share)",
    )
    memory.add_argument(
        "--chunk-size", "--chunk-numel", dest="chunk_numel", type=int, metavar="N", help="elements per chunk"
    )
    memory.add_argument("--margin-use-ratio", type=float, metavar="R", help="of spare memory, for optimizer states")
    memory.add_argument("--states-on-host", action="store_true", help="all optimizer states stay on the host")
    memory.add_argument("--cpu-embedding", action="store_true", help="embeddings stay on the host")
    memory.add_argument("--plan", type=Path, metavar="PATH", help="start with a plan that --save-plan wrote")
    memory.add_argument(
        "--config", type=Path, metavar="PATH", help="JSON with further keys of docs/config.md; they win"
    )


def _add_host_arguments(host: Any) -> None:
    host.add_argument(
        "--states",
        choices=[choice.value for choice in States],
        default="fp32",
        help="what momentum and variance are stored in",
    )
    host.add_argument("--speculation", choices=[choice.value for choice in Speculation], default="auto")
    host.add_argument("--host-threads", type=int, metavar="N", help="per rank (default: its share of the cores)")
    host.add_argument("--rank-timeout", type=float, metavar="SECONDS", help="for another rank (default: 600)")


def _add_output_arguments(output: Any) -> None:
    output.add_argument("--log-every", type=int, default=1, metavar="N", help="steps per line")
    output.add_argument("--json", action="store_true", help="lines are JSON")
    output.add_argument("--save-folder", type=Path, metavar="PATH", help="checkpoints go there, one at the end")
    output.add_argument("--save-every", type=int, metavar="N", help="and one every N steps")
    output.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in --save-folder")
    output.add_argument("--export", type=Path, metavar="PATH", help="write weights for from_pretrained at the end")
    output.add_argument("--save-plan", type=Path, metavar="PATH", help="write the plan of the last step")
    output.add_argument("--profile", type=Path, metavar="PATH", help="a folder for the profile of one step")
    output.add_argument("--profile-step", type=int, default=4, metavar="N", help="which one, counted from here")


def _shape(args: argparse.Namespace) -> ModelShape:
    sizes = dict(zip(("hidden", "layers", "heads", "vocab", "length"), SIZES[args.size], strict=True))
    given = {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}
    return ModelShape(
        kind=ModelKind(args.model), dropout=args.dropout, checkpointing=args.checkpointing, **(sizes | given)
    )


def _training_options(args: argparse.Namespace) -> TrainingOptions:
    schedule_steps = args.steps if args.schedule_steps is None else args.schedule_steps
    return TrainingOptions(
        precision=args.precision,
        lr=args.lr,
        weight_decay=args.weight_decay,
        warmup_steps=schedule_steps // 10 if args.warmup is None else args.warmup,
        schedule_steps=schedule_steps if args.schedule == "cosine" else None,
        clipping=args.clipping,
        accumulate=args.accumulate,
        gpu_memory=args.gpu_mem,
        host_memory=args.host_mem,
        chunk_numel=args.chunk_numel,
        margin_use_ratio=args.margin_use_ratio,
        states_on_host=args.states_on_host,
        cpu_embedding=args.cpu_embedding,
        speculation=args.speculation,
        states=args.states,
        plan=args.plan,
        profile=args.profile,
        profile_step=args.profile_step,
        host_threads=args.host_threads,
        rank_timeout_seconds=args.rank_timeout,
        further=_further_config(args.config),
    )


def _further_config(path: Path | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    try:
        further = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(further, dict):
        raise ValueError(f"--config {path} holds a {type(further).__name__}; give an object of configuration keys")
    return further


def _check_numbers(options: RunOptions) -> None:
    training = options.training
    counts = {"--steps": options.steps, "--batch-size": options.batch, "--gradient-accumulation": training.accumulate}
    counts |= {"--log-every": options.log_every, "--save-every": options.save_every}
    counts |= {"--schedule-steps": training.schedule_steps}
    for flag, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{flag} is {count}; give 1 or more")
    if options.seed < 0:
        raise ValueError(f"--seed is {options.seed}; give 0 or more")
    if training.warmup_steps < 0:
        raise ValueError(f"--warmup is {training.warmup_steps}; give 0 or more")
    if training.speculation == Speculation.COMMIT.value and training.accumulate > 1:
        raise ValueError(
            f"--speculation commit updates in every backward, --gradient-accumulation is {training.accumulate}; leave "
            "out one"
        )


def _check_data(options: RunOptions) -> None:
    if options.data is None or not options.reads_text:
        if options.save_tokens is not None:
            raise ValueError("--save-tokens writes the tokens of a text; give one with --data")
        if options.data is not None:
            if not options.data.is_file():
                raise ValueError(f"--data {options.data} does not exist")
            map_tokens(options.data)
        return
    if not options.data.exists():
        raise ValueError(f"--data {options.data} does not exist")
    text_files(options.data)
    num_tokens, least = options.shape.num_data_tokens, least_tokens(options.tokenizer)
    if not least <= num_tokens <= MAX_TOKENS:
        raise ValueError(
            f"--vocab {options.shape.vocab} leaves {num_tokens} ids for text; give what leaves {least} to {MAX_TOKENS}"
        )
    if options.save_tokens is not None and options.save_tokens.suffix != ".bin":
        raise ValueError(f"--save-tokens is {options.save_tokens}; give a name that ends in .bin")


def _check_files(options: RunOptions) -> None:
    plan = options.training.plan
    if plan is not None and not plan.is_file():
        raise ValueError(f"--plan {plan} does not exist; --save-plan writes one")
    for flag, path in (("--save-plan", options.save_plan), ("--save-tokens", options.save_tokens)):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{flag} {path}: there is no folder {path.parent}; make it")
    if options.export is not None and options.export.exists() and any(options.export.iterdir()):
        raise ValueError(f"--export {options.export} exists and is not empty; remove it or give another folder")
    if options.save_folder is None:
        if options.resume or options.save_every is not None:
            raise ValueError("--resume and --save-every need --save-folder")
        return
    latest = latest_tag(options.save_folder) if options.save_folder.exists() else None
    if options.resume and latest is None:
        raise ValueError(f"--resume: {options.save_folder} has no checkpoint; leave --resume out to start from nothing")
    if not options.resume and latest is not None:
        raise ValueError(
            f"--save-folder {options.save_folder} holds a run ({latest}); give --resume to go on with it, or another "
            "folder"
        )

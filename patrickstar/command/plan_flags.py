"""Arguments of ``patrickstar plan``."""

from __future__ import annotations

import argparse
import re

from patrickstar.choices import (
    ActivationOffload,
    Fp8Recipe,
    Master,
    MatrixMode,
    OptimizerType,
    QuantizationType,
    Recompute,
    Speculation,
    States,
)
from patrickstar.command.flags import CommandParser, at_least_0, at_least_1, memory_size, not_negative, positive
from patrickstar.planning import defaults
from patrickstar.planning.gpus import DATA_SHEETS, H200, PRECISIONS, gpu_name
from patrickstar.planning.images import image_size
from patrickstar.planning.known_models import KNOWN_MODELS
from patrickstar.planning.node_links import LINKS, Link, parse_link

OPTIMIZERS = {member.value.lower(): member for member in OptimizerType}


def plan_parser(prog: str) -> CommandParser:
    """The parser of the command's arguments."""
    parser = CommandParser(prog, "Does it fit, how fast does it train, and what should be changed?")
    work = parser.add_argument_group("what is trained")
    work.add_argument(
        "--model", required=True,
        help=f"a usual name or its hub id ({', '.join(KNOWN_MODELS)}), gpt:HIDDENxLAYERS, a benchmark's size such as "
        "4.3b, or a Hugging Face config.json or folder",
    )  # fmt: skip
    work.add_argument(
        "--batch-size", type=at_least_1, metavar="N",
        help=f"sequences per forward and GPU, or GPUs that share them (default: {defaults.BATCH})",
    )  # fmt: skip
    work.add_argument(
        "--seq-len", type=at_least_1, metavar="N", help=f"tokens per sequence (default: {defaults.LENGTH})"
    )
    work.add_argument("--longest", action="store_true", help="instead of --seq-len: the longest sequences that fit")
    work.add_argument(
        "--images", type=at_least_0, default=0, metavar="N",
        help="images in each sequence of a vision-language model; their tokens are part of --seq-len",
    )  # fmt: skip
    work.add_argument(
        "--image-size", type=_image_size, metavar="WIDTHxHEIGHT",
        help=f"pixels of each image, before the model's image processor (default: {defaults.IMAGE_SIZE})",
    )  # fmt: skip
    work.add_argument(
        "--sequence-parallel", type=at_least_1, default=1, metavar="N", help="GPUs that share each sequence"
    )
    work.add_argument(
        "--tensor-parallel", type=_mesh, metavar="MESH",
        help="GPUs that share matrices: ROWSxCOLUMNS, how many (the mesh that receives least), or auto: all GPUs "
        "that share no sequence",
    )  # fmt: skip
    work.add_argument(
        "--tensor-mode", choices=[mode.value for mode in MatrixMode], default="auto",
        help="of --tensor-parallel: in blocks, in one dimension with sequences sharded, or what receives less",
    )  # fmt: skip
    work.add_argument(
        "--expert-parallel", type=at_least_1, default=1, metavar="N", help="GPUs that divide the experts of a mixture"
    )
    work.add_argument(
        "--fused-loss", action=argparse.BooleanOptionalAction, default=False,
        help="a loss without logits, activations.loss (default: the model's own)",
    )  # fmt: skip
    work.add_argument(
        "--tile-tokens", type=at_least_0, default=0, metavar="N",
        help="MLPs and norms are computed so many tokens at a time, activations.tile_tokens (default: 0, all at once)",
    )  # fmt: skip
    work.add_argument(
        "--gradient-accumulation", type=at_least_1, default=1, metavar="N", help="forwards and backwards per step"
    )
    work.add_argument(
        "--tokens-per-step", type=at_least_1, metavar="N",
        help="instead of --batch-size and --gradient-accumulation: the fastest of these for so many tokens on all GPUs",
    )  # fmt: skip
    work.add_argument(
        "--checkpointing", action=argparse.BooleanOptionalAction, default=True,
        help="compute activations again in backward, as far as that pays (default: yes)",
    )  # fmt: skip
    work.add_argument(
        "--lora-rank", type=at_least_0, default=0, metavar="R", help="train adapters of this rank alone, 0: everything"
    )
    work.add_argument(
        "--quantization", choices=[member.value for member in QuantizationType],
        help="quantization.type: what frozen linear weights are stored in (default: as they are); without --lora-rank, "
        f"adapters of rank {defaults.LORA_RANK} are trained",
    )  # fmt: skip
    work.add_argument(
        "--fp8", choices=[member.value for member in Fp8Recipe],
        help="fp8.recipe: linear layers and experts multiply in 8 bits (default: they do not)",
    )  # fmt: skip
    work.add_argument("--precision", choices=PRECISIONS, default="bf16", help="of compute")
    work.add_argument("--clip", type=not_negative, default=0.0, metavar="NORM", help="gradient_clipping, 0: none")

    machine = parser.add_argument_group("on what")
    machine.add_argument("--gpu", type=_gpu, default=H200, help=f"whose rates to use: {', '.join(DATA_SHEETS)}")
    machine.add_argument("--gpu-tflops", type=positive, metavar="N", help="dense 16-bit, as a data sheet says it")
    machine.add_argument(
        "--gpu-bandwidth", type=positive, metavar="GB/s", help="of its memory, as a data sheet says it"
    )
    machine.add_argument("--gpu-memory", type=memory_size, metavar="SIZE", help="that it has")
    machine.add_argument("--host-link", type=positive, metavar="GB/s", help="between host and GPU, each way")
    machine.add_argument("--cpu-cores", type=at_least_1, metavar="N", help="for each GPU (default: 16)")
    machine.add_argument("--host-bandwidth", type=positive, metavar="GB/s", help="of a socket's memory (default: 213)")
    machine.add_argument(
        "--disk-bandwidth", type=positive, metavar="GB/s",
        help="of a node's disk, reads and writes each while both happen (default: 2)",
    )  # fmt: skip
    machine.add_argument("--nodes", type=at_least_1, default=1, metavar="N", help="of GPUs that share each chunk")
    machine.add_argument("--gpus-per-node", type=at_least_1, default=1, metavar="N", help="connected with each other")
    machine.add_argument(
        "--link", type=_link, default="nvlink", help=f"between nodes: {', '.join(LINKS)}, or GB/s for each GPU"
    )
    machine.add_argument(
        "--also",
        type=_gpu_counts,
        default=(),
        metavar="GPUS",
        help="other numbers of GPUs to tell the step of, such as 8,32,256",
    )
    machine.add_argument("--measure", action="store_true", help="measure this machine's link and Adam instead")

    engine = parser.add_argument_group("the engine's configuration")
    engine.add_argument(
        "--device-memory", type=memory_size, metavar="SIZE",
        help="device_memory of each engine, such as 24GiB (default: what an engine would take of the GPU)",
    )  # fmt: skip
    engine.add_argument(
        "--host-memory", type=memory_size, metavar="SIZE",
        help="host_memory of each engine, at most (default: what an engine would take of this machine)",
    )  # fmt: skip
    engine.add_argument(
        "--disk", type=memory_size, metavar="SIZE",
        help="disk_memory.size of each engine, for optimizer states that nothing else has room for (default: none)",
    )  # fmt: skip
    engine.add_argument("--chunk-numel", type=_chunk_numel, metavar="N", help="elements per chunk (default: auto)")
    engine.add_argument(
        "--margin-use-ratio", type=positive, default=1.0, metavar="RATIO", help="client.mem_tracer.margin_use_ratio"
    )
    engine.add_argument(
        "--speculation", choices=[member.value for member in Speculation], default=Speculation.AUTO.value,
        help="optimizer.speculation",
    )  # fmt: skip
    engine.add_argument(
        "--optimizer", type=str.lower, choices=sorted(OPTIMIZERS), default=OptimizerType.ADAMW.value.lower(),
        help="optimizer.type: Lion and SGD keep a momentum and no variance",
    )  # fmt: skip
    engine.add_argument(
        "--states", choices=[member.value for member in States], default=States.FP32.value,
        help="optimizer.states: what momentum and variance are stored in",
    )  # fmt: skip
    engine.add_argument(
        "--master", choices=[member.value for member in Master], default=Master.EXACT.value,
        help="optimizer.master: stochastic leaves float32 masters out",
    )  # fmt: skip
    engine.add_argument(
        "--offload", choices=[member.value for member in ActivationOffload], default=ActivationOffload.AUTO.value,
        help="activations.offload: whose activations may leave the device between forward and backward",
    )  # fmt: skip
    engine.add_argument(
        "--recompute", choices=[member.value for member in Recompute], default=Recompute.AUTO.value,
        help="activations.recompute: how much of checkpointed layers is computed again",
    )  # fmt: skip

    output = parser.add_argument_group("output")
    output.add_argument("--verbose", action="store_true", help="say more: rates, chunk sizes, stalls, configuration")
    output.add_argument(
        "--advice", action=argparse.BooleanOptionalAction, default=True, help="plan what would help, too"
    )
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--save", metavar="PATH", help="also write the plan there")
    output.add_argument(
        "--listing", action="store_true", help="also print the step's program: its instructions, and when each is done"
    )
    return parser


def _gpu(text: str) -> str:
    try:
        return gpu_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _link(text: str) -> Link:
    try:
        return parse_link(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _image_size(text: str) -> tuple[int, int]:
    try:
        return image_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _chunk_numel(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1024:
        raise argparse.ArgumentTypeError(f"it is {text!r}; give auto or at least 1024 elements")
    return int(text)


def _gpu_counts(text: str) -> list[int]:
    counts = text.split(",")
    if not all(count.isdecimal() and int(count) for count in counts):
        raise argparse.ArgumentTypeError(f"it is {text!r}; give numbers of GPUs, such as 8,32,256")
    return [int(count) for count in counts]


def _mesh(text: str) -> str:
    if text != "auto" and mesh_shape(text) is None and not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"it is {text!r}; give ROWSxCOLUMNS such as 2x2, a number of GPUs, or auto")
    return text


def mesh_shape(text: str) -> tuple[int, int] | None:
    """Rows and columns of ``--tensor-parallel ROWSxCOLUMNS``; None: the shape is to be chosen."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    return None if match is None else (int(match.group(1)), int(match.group(2)))

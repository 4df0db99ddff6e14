r"""Plans, and the cost of a step, without a GPU.

    patrickstar plan --model llama-3.1-8b --gpu rtx4090 --host-memory 128GiB --seq-len 2048 --checkpointing

says whether a model fits, its tokens per second, and what bounds the step. It lists changes that would help, with their
gain (each was planned again), and the matching configuration.

    patrickstar plan --model 10.5b --device-memory 24GiB --host-memory 64GiB --checkpointing \\
        --nodes 4 --gpus-per-node 8 --link ib400 --also 8,256

plans many GPUs, each with its own batch and budgets.

    patrickstar plan --model llama-3.1-8b --checkpointing --fused-loss --tile-tokens 4096 --gpus-per-node 2 \\
        --sequence-parallel 2 --longest

finds the longest sequences that one GPU, and two GPUs with context parallelism, can train. ``--tensor-parallel 2x2``
shards matrices over four GPUs; ``auto`` chooses the mesh that sends least.

In programs ``engine.plan()`` returns a running engine's plan. :class:`Plan` saves and loads it, the configuration's
``plan`` starts a new engine with it, and :func:`predict` simulates it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Sequence

from patrickstar.command.flags import (
    CommandParser,
    at_least_0,
    at_least_1,
    memory_size,
    not_negative,
    positive,
    run_reporting,
)
from patrickstar.command.plan_report import (
    advice_lines,
    answer_as_dict,
    answer_lines,
    comparison_lines,
    configuration_lines,
    length_as_dict,
    length_lines,
    program_lines,
    refusal_lines,
)
from patrickstar.config import (
    ActivationOffload,
    LossComputation,
    Master,
    OptimizerType,
    QuantizationType,
    Speculation,
    States,
)
from patrickstar.machine import host_memory
from patrickstar.machine.budgets import expected_device_bytes
from patrickstar.planning.advice import Advice, advise, rescue
from patrickstar.planning.cluster import LINKS, Cluster, parse_link
from patrickstar.planning.known_models import KNOWN_MODELS
from patrickstar.planning.longest import longest
from patrickstar.planning.machines import MACHINES, Machine, given_disk, given_gpu, given_host, measured
from patrickstar.planning.models import model_config
from patrickstar.planning.planner import Answer, Planner
from patrickstar.planning.predicted_step import Prediction
from patrickstar.planning.prediction import predict_case
from patrickstar.planning.proposals import LORA_RANK
from patrickstar.planning.question import DTYPES, Question, Workload, check_precision
from patrickstar.planning.setting import DoesNotFitError, Setting
from patrickstar.planning.sharded_matrices import MatrixMesh, cheapest_mesh
from patrickstar.planning.simulation import predict
from patrickstar.planning.step_plan import Plan
from patrickstar.tensor2d.cost import Mode

_GRAIN = 2**28
_BATCH, _LENGTH = 16, 1024
_OPTIMIZERS = {member.value.lower(): member for member in OptimizerType}

__all__ = ["Plan", "Prediction", "Setting", "main", "predict", "predict_case"]


def main(arguments: Sequence[str] | None = None, prog: str = "python -m patrickstar.plan") -> int:
    """The command. Returns 0, 1 if the model does not fit, 2 if an argument is wrong."""
    args = _parser(prog).parse_args(arguments)
    return run_reporting(prog, functools.partial(_tell, args))


def _parser(prog: str) -> CommandParser:
    parser = CommandParser(prog, "Does it fit, how fast does it train, and what should be changed?")
    work = parser.add_argument_group("what is trained")
    work.add_argument(
        "--model", required=True,
        help=f"a usual name ({', '.join(KNOWN_MODELS)}), gpt:HIDDENxLAYERS, a benchmark's size such as 4.3b, or a "
        "Hugging Face config.json or folder",
    )  # fmt: skip
    work.add_argument(
        "--batch-size", type=at_least_1, metavar="N",
        help=f"sequences per forward and GPU, or GPUs that share them (default: {_BATCH}, 1 with --longest)",
    )  # fmt: skip
    work.add_argument("--seq-len", type=at_least_1, metavar="N", help=f"tokens per sequence (default: {_LENGTH})")
    work.add_argument("--longest", action="store_true", help="instead of --seq-len: the longest sequences that fit")
    work.add_argument(
        "--sequence-parallel", type=at_least_1, default=1, metavar="N", help="GPUs that share each sequence"
    )
    work.add_argument(
        "--tensor-parallel", metavar="MESH",
        help="GPUs that share matrices: ROWSxCOLUMNS, how many (the mesh that receives least), or auto: all GPUs "
        "that share no sequence",
    )  # fmt: skip
    work.add_argument(
        "--tensor-mode", choices=["auto", *(mode.value for mode in Mode)], default="auto",
        help="of --tensor-parallel: in blocks, in one dimension with sequences sharded, or what receives less",
    )  # fmt: skip
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
        "--checkpointing", action=argparse.BooleanOptionalAction, default=False,
        help="compute activations again in backward (default: they are kept)",
    )  # fmt: skip
    work.add_argument(
        "--lora-rank", type=int, default=0, metavar="R", help="train adapters of this rank alone, 0: everything"
    )
    work.add_argument(
        "--quantization", choices=[member.value for member in QuantizationType],
        help="quantization.type: what frozen linear weights are stored in (default: as they are); without --lora-rank, "
        f"adapters of rank {LORA_RANK} are trained",
    )  # fmt: skip
    work.add_argument("--precision", choices=DTYPES, default="bf16", help="of compute")
    work.add_argument("--clip", type=not_negative, default=0.0, metavar="NORM", help="gradient_clipping, 0: none")

    machine = parser.add_argument_group("on what")
    machine.add_argument("--gpu", choices=MACHINES, default="h200", help="whose rates to use")
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
    machine.add_argument("--link", default="nvlink", help=f"between nodes: {', '.join(LINKS)}, or GB/s for each GPU")
    machine.add_argument("--also", metavar="GPUS", help="other numbers of GPUs to tell the step of, such as 8,32,256")
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
    engine.add_argument("--chunk-numel", default="auto", metavar="N", help="elements per chunk")
    engine.add_argument(
        "--margin-use-ratio", type=positive, default=1.0, metavar="RATIO", help="client.mem_tracer.margin_use_ratio"
    )
    engine.add_argument(
        "--speculation", choices=[member.value for member in Speculation], default=Speculation.AUTO.value,
        help="optimizer.speculation",
    )  # fmt: skip
    engine.add_argument(
        "--optimizer", type=str.lower, choices=sorted(_OPTIMIZERS), default=OptimizerType.ADAMW.value.lower(),
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

    output = parser.add_argument_group("output")
    output.add_argument(
        "--advice", action=argparse.BooleanOptionalAction, default=True, help="plan what would help, too"
    )
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--save", metavar="PATH", help="also write the plan there")
    output.add_argument(
        "--listing", action="store_true", help="also print the step's program: its instructions, and when each is done"
    )
    return parser


# From flags to questions


def _question(args: argparse.Namespace) -> Question:
    if not 0 < args.margin_use_ratio <= 1:
        raise ValueError(f"--margin-use-ratio is {args.margin_use_ratio}; give more than 0 and at most 1")
    if args.lora_rank < 0:
        raise ValueError(f"--lora-rank is {args.lora_rank}; give 0 or more")
    if args.longest and args.seq_len is not None:
        raise ValueError(f"--longest finds the length, but --seq-len is {args.seq_len}; leave out one of them")
    speculation = Speculation(args.speculation)
    if speculation is Speculation.COMMIT and (args.gradient_accumulation > 1 or args.clip > 0):
        raise ValueError(
            "--speculation commit updates in every backward, for good; leave out --gradient-accumulation and --clip"
        )
    if args.master == Master.STOCHASTIC.value and (speculation is Speculation.ALWAYS or args.precision != "bf16"):
        raise ValueError(
            "--master stochastic needs --precision bf16 and not --speculation always; change these, or leave it out"
        )
    machine = _machine(args)
    check_precision(args.precision, machine)
    cluster = Cluster(nodes=args.nodes, gpus_per_node=args.gpus_per_node, link=parse_link(args.link))
    batch, length = args.batch_size or (1 if args.longest else _BATCH), args.seq_len or _LENGTH
    return Question(
        workload=Workload(
            model=args.model,
            batch=batch,
            length=length,
            checkpointing=args.checkpointing,
            lora_rank=args.lora_rank or (0 if args.quantization is None else LORA_RANK),
            quantization=None if args.quantization is None else QuantizationType(args.quantization),
            precision=args.precision,
            loss=LossComputation.FUSED if args.fused_loss else LossComputation.WHOLE,
            tile_tokens=args.tile_tokens,
            sequence_ranks=args.sequence_parallel,
            mesh=_mesh(args, cluster, batch, length),
        ),
        machine=machine,
        setting=Setting(
            device_bytes=args.device_memory or _usual_device_bytes(machine, cluster),
            host_bytes=args.host_memory or _in_words(host_memory.default_budget_bytes()),
            disk_bytes=args.disk or 0,
            margin_use_ratio=args.margin_use_ratio,
            speculation=speculation,
            optimizer=_OPTIMIZERS[args.optimizer],
            states=States(args.states),
            master=Master(args.master),
            accumulation=args.gradient_accumulation,
            offload=ActivationOffload(args.offload),
        ),
        cluster=cluster,
        chunk_numel=_chunk_numel(args.chunk_numel),
        clipping=args.clip,
    )


def _mesh(args: argparse.Namespace, cluster: Cluster, batch: int, length: int) -> MatrixMesh | None:
    text, mode = args.tensor_parallel, None if args.tensor_mode == "auto" else Mode(args.tensor_mode)
    if text is None:
        if mode is not None:
            raise ValueError(f"--tensor-mode is {mode.value}, but nothing is divided; give --tensor-parallel too")
        return None
    beside = {"--lora-rank": args.lora_rank > 0, "--quantization": args.quantization is not None}
    others = [flag for flag, is_given in beside.items() if is_given]
    if others:
        raise ValueError(
            f"--tensor-parallel is given with {', '.join(others)}, which is planned for whole matrices alone; leave "
            "out one of them"
        )
    if args.sequence_parallel > 1:
        if mode is Mode.ONE:
            raise ValueError(
                f"--tensor-mode is 1d, which divides sequences itself, and --sequence-parallel is "
                f"{args.sequence_parallel}; give --tensor-mode 2d, or leave out --sequence-parallel"
            )
        mode = Mode.TWO
    asked = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if asked is not None:
        rows, columns = int(asked.group(1)), int(asked.group(2))
        if mode is Mode.ONE and rows > 1:
            raise ValueError(
                f"--tensor-parallel is {text}, but one dimension has no rows; give {rows * columns}, or leave out "
                "--tensor-mode 1d"
            )
        return MatrixMesh(mode=mode or Mode.TWO, rows=rows, columns=columns)
    if text != "auto" and not re.fullmatch(r"[1-9]\d*", text):
        raise ValueError(f"--tensor-parallel is {text!r}; give ROWSxCOLUMNS such as 2x2, a number of GPUs, or auto")
    if args.longest:
        raise ValueError(
            f"--tensor-parallel is {text}, whose mesh follows from the length that --longest looks for; give "
            "ROWSxCOLUMNS, or --seq-len"
        )
    ranks = max(cluster.num_ranks // args.sequence_parallel, 1) if text == "auto" else int(text)
    if ranks == 1:
        return None
    here = -(-length // args.sequence_parallel)
    return cheapest_mesh(model_config(args.model, length), batch, here, ranks, mode)


def _machine(args: argparse.Namespace) -> Machine:
    machine = given_gpu(
        MACHINES[args.gpu],
        tflops=args.gpu_tflops,
        gbps=args.gpu_bandwidth,
        num_bytes=args.gpu_memory,
        link_gbps=args.host_link,
    )
    machine = given_host(machine, cores=args.cpu_cores, gbps=args.host_bandwidth)
    machine = given_disk(machine, args.disk_bandwidth)
    return measured(machine) if args.measure else machine


def _usual_device_bytes(machine: Machine, cluster: Cluster) -> int:
    return _in_words(expected_device_bytes(machine.gpu_bytes, by_nccl=cluster.num_ranks > 1))


def _in_words(num_bytes: int) -> int:
    """Rounds down to a size that a configuration states in a short text."""
    return max(num_bytes // _GRAIN * _GRAIN, min(num_bytes, _GRAIN))


def _chunk_numel(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1024:
        raise ValueError(f"--chunk-numel is {text!r}; give auto or at least 1024 elements")
    return int(text)


def _others(args: argparse.Namespace, question: Question) -> list[Question]:
    """The question for the other numbers of GPUs in ``--also``."""
    sizes = args.also.split(",") if args.also else []
    if not all(size.isdigit() for size in sizes):
        raise ValueError(f"--also is {args.also!r}; give numbers of GPUs, such as 8,32,256")
    clusters = [question.cluster.of_size(int(size)) for size in sizes]
    return [dataclasses.replace(question, cluster=cluster) for cluster in clusters]


def _tell(args: argparse.Namespace) -> int:
    question = _question(args)
    planner = Planner()
    lengths = _longest(planner, question) if args.longest else []
    if lengths and isinstance(lengths[-1][1], Answer):
        question = lengths[-1][1].question
    others = _others(args, question)
    found = lengths[-1][1] if lengths else planner.try_answer(question)
    also = [planner.try_answer(other) for other in others]
    advice: list[Advice] = []
    if args.advice:
        is_refused = isinstance(found, DoesNotFitError)
        advice = rescue(planner, question, found) if is_refused else advise(planner, found)
    if args.save and isinstance(found, Answer):
        found.chosen.plan.save(args.save)
    if args.json:
        said = answer_as_dict(found) | {"advice": [item.as_dict() for item in advice]}
        if lengths:
            said["longest"] = [{"sequence_parallel": size} | length_as_dict(one) for size, one in lengths]
        print(json.dumps(said | ({"also": [answer_as_dict(other) for other in also]} if also else {})))
    else:
        mesh_size = 1 if question.workload.mesh is None else question.workload.mesh.size
        lines = length_lines([(size * mesh_size, one) for size, one in lengths])
        lines += answer_lines(found) if isinstance(found, Answer) else refusal_lines(question, found)
        lines += advice_lines(advice, found) if args.advice else []
        lines += comparison_lines([found, *also], [question, *others]) if also else []
        if isinstance(found, Answer):
            lines += configuration_lines(found) + (program_lines(found) if args.listing else [])
        print("\n".join(lines))
    return 0 if isinstance(found, Answer) else 1


def _longest(planner: Planner, question: Question) -> list[tuple[int, Answer | DoesNotFitError]]:
    """The longest sequences that fit: on one GPU, then on the requested number of GPUs."""
    found: list[tuple[int, Answer | DoesNotFitError]] = []
    for size in sorted({1, question.workload.sequence_ranks}):
        workload = dataclasses.replace(question.workload, sequence_ranks=size)
        try:
            found.append((size, longest(planner, dataclasses.replace(question, workload=workload))))
        except DoesNotFitError as refusal:
            found.append((size, refusal))
    return found


if __name__ == "__main__":
    sys.exit(main())

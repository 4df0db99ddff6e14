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

from patrickstar.command.flags import run_reporting
from patrickstar.command.plan_flags import DEFAULT_BATCH, DEFAULT_LENGTH, OPTIMIZERS, plan_parser
from patrickstar.command.plan_report import (
    advice_lines,
    answer_as_dict,
    answer_lines,
    batch_as_dict,
    batch_lines,
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
    QuantizationType,
    Recompute,
    Speculation,
    States,
)
from patrickstar.machine import host_memory
from patrickstar.machine.budgets import expected_device_bytes
from patrickstar.planning.advice import Advice, advise, rescue
from patrickstar.planning.best_batch import batch_questions, best_batch
from patrickstar.planning.cluster import Cluster, parse_link
from patrickstar.planning.longest import longest
from patrickstar.planning.machines import MACHINES, Machine, given_disk, given_gpu, given_host, measured
from patrickstar.planning.models import model_config
from patrickstar.planning.planner import Answer, Planner
from patrickstar.planning.predicted_step import Prediction
from patrickstar.planning.prediction import predict_case
from patrickstar.planning.proposals import LORA_RANK
from patrickstar.planning.question import Question, Workload, check_precision
from patrickstar.planning.setting import DoesNotFitError, Setting
from patrickstar.planning.sharded_matrices import MatrixMesh, cheapest_mesh
from patrickstar.planning.simulation import predict
from patrickstar.planning.step_plan import Plan
from patrickstar.tensor2d.cost import Mode

_GRAIN = 2**28

__all__ = ["Plan", "Prediction", "Setting", "main", "predict", "predict_case"]


def main(arguments: Sequence[str] | None = None, prog: str = "python -m patrickstar.plan") -> int:
    """The command. Returns 0, 1 if the model does not fit, 2 if an argument is wrong."""
    args = plan_parser(prog).parse_args(arguments)
    return run_reporting(prog, functools.partial(_tell, args))


# From flags to questions


def _question(args: argparse.Namespace) -> Question:
    if not 0 < args.margin_use_ratio <= 1:
        raise ValueError(f"--margin-use-ratio is {args.margin_use_ratio}; give more than 0 and at most 1")
    if args.lora_rank < 0:
        raise ValueError(f"--lora-rank is {args.lora_rank}; give 0 or more")
    if args.longest and args.seq_len is not None:
        raise ValueError(f"--longest finds the length, but --seq-len is {args.seq_len}; leave out one of them")
    beside = {
        "--longest": args.longest,
        "--batch-size": args.batch_size,
        "--gradient-accumulation": args.gradient_accumulation > 1,
    }
    given = [flag for flag, is_given in beside.items() if is_given]
    if args.tokens_per_step is not None and given:
        raise ValueError(
            f"--tokens-per-step {args.tokens_per_step} is given with {', '.join(given)}; leave out one of them"
        )
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
    batch, length = args.batch_size or (1 if args.longest else DEFAULT_BATCH), args.seq_len or DEFAULT_LENGTH
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
            optimizer=OPTIMIZERS[args.optimizer],
            states=States(args.states),
            master=Master(args.master),
            accumulation=args.gradient_accumulation,
            offload=ActivationOffload(args.offload),
            recompute=Recompute(args.recompute),
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
    batches: list[Answer] = []
    if lengths:
        found = lengths[-1][1]
    elif args.tokens_per_step is not None:
        question = batch_questions(question, args.tokens_per_step)[-1]
        found, batches = _fastest(planner, question, args.tokens_per_step)
    else:
        found = planner.try_answer(question)
    if isinstance(found, Answer):
        question = found.question
    others = _others(args, question)
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
        if batches:
            said["batches"] = [batch_as_dict(one) for one in batches]
        print(json.dumps(said | ({"also": [answer_as_dict(other) for other in also]} if also else {})))
    else:
        mesh_size = 1 if question.workload.mesh is None else question.workload.mesh.size
        lines = length_lines([(size * mesh_size, one) for size, one in lengths])
        lines += batch_lines(batches)
        lines += answer_lines(found) if isinstance(found, Answer) else refusal_lines(question, found)
        lines += advice_lines(advice, found) if args.advice else []
        lines += comparison_lines([found, *also], [question, *others]) if also else []
        if isinstance(found, Answer):
            lines += configuration_lines(found) + (program_lines(found) if args.listing else [])
        print("\n".join(lines))
    return 0 if isinstance(found, Answer) else 1


def _fastest(planner: Planner, question: Question, tokens: int) -> tuple[Answer | DoesNotFitError, list[Answer]]:
    """The fastest batch size for ``tokens`` per step, and all that were tried, or a refusal."""
    try:
        batches = best_batch(planner, question, tokens)
    except DoesNotFitError as refusal:
        return refusal, []
    return batches[0], batches


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

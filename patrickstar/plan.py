r"""Plans, and what a step costs, without a GPU.

    patrickstar plan --model llama-3.1-8b --gpu rtx4090 --host-memory 128GiB --seq-len 2048 --checkpointing

says whether a model fits, how many tokens per second it trains, what bounds the step, which changes would help and by
how much (each was planned again), and the configuration to train so;

    patrickstar plan --model 10.5b --device-memory 24GiB --host-memory 64GiB --checkpointing \\
        --nodes 4 --gpus-per-node 8 --link ib400 --also 8,256

the same for many GPUs, each of which has a batch and budgets of its own;

    patrickstar plan --model llama-3.1-8b --checkpointing --fused-loss --tile-tokens 4096 --gpus-per-node 2 \\
        --sequence-parallel 2 --longest

the longest sequences that one GPU, and two that share them, can train. In programs: ``engine.plan()`` gives the plan
of a running engine, :class:`Plan` saves and loads it, the configuration's ``plan`` makes a new engine start with it,
and :func:`predict` plays it on a machine of given rates.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

from patrickstar.command.flags import (
    CommandParser,
    at_least_0,
    at_least_1,
    memory_size,
    not_negative,
    positive,
    run_reporting,
)
from patrickstar.config import ActivationOffload, LossComputation, Speculation
from patrickstar.machine import host_memory
from patrickstar.machine.budgets import expected_device_bytes
from patrickstar.planning.advice import Advice, advise, rescue
from patrickstar.planning.cluster import LINKS, Cluster, parse_link
from patrickstar.planning.known_models import KNOWN_MODELS
from patrickstar.planning.longest import longest
from patrickstar.planning.machines import MACHINES, Machine, given_gpu, given_host, measured
from patrickstar.planning.planner import DTYPES, Answer, Planner, Question, Workload, check_precision
from patrickstar.planning.prediction import Case, DoesNotFitError, Prediction, Setting, predict, predict_case
from patrickstar.planning.step_plan import Plan
from patrickstar.sequence.choice import Choice, show_seconds
from patrickstar.sizes import enough_size, show_size

_GRAIN = 2**28
_BATCH, _LENGTH = 16, 1024

__all__ = ["Plan", "Prediction", "Setting", "main", "predict", "predict_case"]


def main(arguments: Sequence[str] | None = None, prog: str = "python -m patrickstar.plan") -> int:
    """The command. Returns 0, 1 when the model does not fit, 2 when an argument is wrong."""
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
    engine.add_argument("--chunk-numel", default="auto", metavar="N", help="elements per chunk")
    engine.add_argument(
        "--margin-use-ratio", type=positive, default=0.95, metavar="RATIO", help="client.mem_tracer.margin_use_ratio"
    )
    engine.add_argument(
        "--speculation", choices=[member.value for member in Speculation], default=Speculation.AUTO.value,
        help="optimizer.speculation",
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
    machine = _machine(args)
    check_precision(args.precision, machine)
    cluster = Cluster(nodes=args.nodes, gpus_per_node=args.gpus_per_node, link=parse_link(args.link))
    return Question(
        workload=Workload(
            model=args.model,
            batch=args.batch_size or (1 if args.longest else _BATCH),
            length=args.seq_len or _LENGTH,
            checkpointing=args.checkpointing,
            lora_rank=args.lora_rank,
            precision=args.precision,
            loss=LossComputation.FUSED if args.fused_loss else LossComputation.WHOLE,
            tile_tokens=args.tile_tokens,
            sequence_ranks=args.sequence_parallel,
        ),
        machine=machine,
        setting=Setting(
            device_bytes=args.device_memory or _usual_device_bytes(machine, cluster),
            host_bytes=args.host_memory or _in_words(host_memory.default_budget_bytes()),
            margin_use_ratio=args.margin_use_ratio,
            speculation=speculation,
            accumulation=args.gradient_accumulation,
            offload=ActivationOffload(args.offload),
        ),
        cluster=cluster,
        chunk_numel=_chunk_numel(args.chunk_numel),
        clipping=args.clip,
    )


def _machine(args: argparse.Namespace) -> Machine:
    machine = given_gpu(
        MACHINES[args.gpu],
        tflops=args.gpu_tflops,
        gbps=args.gpu_bandwidth,
        num_bytes=args.gpu_memory,
        link_gbps=args.host_link,
    )
    machine = given_host(machine, cores=args.cpu_cores, gbps=args.host_bandwidth)
    return measured(machine) if args.measure else machine


def _usual_device_bytes(machine: Machine, cluster: Cluster) -> int:
    return _in_words(expected_device_bytes(machine.gpu_bytes, by_nccl=cluster.num_ranks > 1))


def _in_words(num_bytes: int) -> int:
    """As much as a configuration says in a short text, and not more."""
    return max(num_bytes // _GRAIN * _GRAIN, min(num_bytes, _GRAIN))


def _chunk_numel(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1024:
        raise ValueError(f"--chunk-numel is {text!r}; give auto or at least 1024 elements")
    return int(text)


def _others(args: argparse.Namespace, question: Question) -> list[Question]:
    """With the other numbers of GPUs that were asked for."""
    sizes = args.also.split(",") if args.also else []
    if not all(size.isdigit() for size in sizes):
        raise ValueError(f"--also is {args.also!r}; give numbers of GPUs, such as 8,32,256")
    clusters = [question.cluster.of_size(int(size)) for size in sizes]
    return [dataclasses.replace(question, cluster=cluster) for cluster in clusters]


# From answers to what is printed


def _tell(args: argparse.Namespace) -> int:
    question = _question(args)
    planner = Planner()
    lengths = _longest(planner, question) if args.longest else []
    if lengths and isinstance(lengths[-1][1], Answer):
        question = lengths[-1][1].question
    others = _others(args, question)
    found = lengths[-1][1] if lengths else _ask(planner, question)
    also = [_ask(planner, other) for other in others]
    advice: list[Advice] = []
    if args.advice:
        is_refused = isinstance(found, DoesNotFitError)
        advice = rescue(planner, question, found) if is_refused else advise(planner, found)
    if args.save and isinstance(found, Answer):
        found.chosen.plan.save(args.save)
    if args.json:
        said = _as_dict(found) | {"advice": [item.as_dict() for item in advice]}
        if lengths:
            said["longest"] = [{"sequence_parallel": size} | _length_as_dict(one) for size, one in lengths]
        print(json.dumps(said | ({"also": [_as_dict(other) for other in also]} if also else {})))
    else:
        lines = _length_lines(lengths)
        lines += _lines(found) if isinstance(found, Answer) else _refusal_lines(question, found)
        lines += _advice_lines(advice, found) if args.advice else []
        lines += _comparison([found, *also], [question, *others]) if also else []
        if isinstance(found, Answer):
            lines += ["configuration (the learning rate is yours):", json.dumps(found.config(), indent=2)]
        print("\n".join(lines))
    return 0 if isinstance(found, Answer) else 1


def _longest(planner: Planner, question: Question) -> list[tuple[int, Answer | DoesNotFitError]]:
    """The longest sequences that fit: of one GPU each, and of as many as were asked for, which come last."""
    found: list[tuple[int, Answer | DoesNotFitError]] = []
    for size in sorted({1, question.workload.sequence_ranks}):
        workload = dataclasses.replace(question.workload, sequence_ranks=size)
        try:
            found.append((size, longest(planner, dataclasses.replace(question, workload=workload))))
        except DoesNotFitError as refusal:
            found.append((size, refusal))
    return found


def _ask(planner: Planner, question: Question) -> Answer | DoesNotFitError:
    try:
        return planner.answer(question)
    except DoesNotFitError as refusal:
        return refusal


def _lines(answer: Answer) -> list[str]:
    question, case, step = answer.question, answer.chosen, answer.chosen.step
    setting, num_chunks = question.setting, len(case.plan.chunks)
    stalls = ", ".join(f"{name.replace('_', ' ')} {s * 1e3:.0f} ms" for name, s in step.stall_seconds.items())
    early = f"{case.num_speculated_chunks} are updated during backward"
    if case.num_parameters_first:
        early += f", of {case.num_parameters_first} of them the parameters, and the states behind the step"
    lines = [
        f"{answer.num_params / 1e9:.2f} B parameters{_trained(answer)} on {question.machine.name} "
        f"({question.machine.source})",
        _work(question),
        *_position_lines(answer),
        *_cluster_lines(answer),
        *_attention_lines(answer),
        f"fits: device {show_size(step.peak_bytes)} of {show_size(setting.device_bytes)} (activations "
        f"{show_size(case.plan.tide_peak_bytes)}), host {show_size(case.host_bytes)} and at its "
        f"peak {show_size(case.host_peak_bytes)} of {show_size(setting.host_bytes)}",
        *_stash_lines(case),
        f"least that works, all optimizer states on the host: device_memory {enough_size(case.least_device_bytes)}, "
        f"host_memory {enough_size(case.least_host_bytes)} "
        f"({case.least_host_bytes * question.cluster.num_ranks / answer.num_params:.1f} bytes per parameter)",
        f"placement: {case.num_device_state_chunks} of {num_chunks} chunks have their optimizer states on the GPU; "
        f"{early}",
    ]
    if case.setting.host_bytes < setting.host_bytes:
        lines.append(
            f"host_memory {enough_size(case.setting.host_bytes)} of {show_size(setting.host_bytes)} is best: with more "
            "of it an engine leaves to the host what is sooner done on the GPU, or makes whole updates where the next "
            "forward needs parameters first"
        )
    if case.setting.margin_use_ratio < setting.margin_use_ratio:
        lines.append(
            f"margin_use_ratio {case.setting.margin_use_ratio:g} is best: with more an engine updates on the GPU, "
            "between two steps, what the host updates beside it"
        )
    lines.append("chunk size   at most held for nothing   least device_memory   up per step   step")
    lines += [
        f"{c.chunk_numel / 2**20:7.1f} Mi   {show_size(c.waste_bytes):>19}       {show_size(c.least_device_bytes):>19}"
        f"   {show_size(c.step.uploaded_bytes):>11}   {c.step.seconds:.3f} s"
        + ("   <- this plan" if c.chunk_numel == case.chunk_numel else "")
        for c in answer.cases
    ]
    lines += [
        f"step {step.seconds:.3f} s, {answer.tokens_per_second:,.0f} tokens/s, "
        f"{answer.model_flops / step.seconds / 1e12:.0f} model TFLOPS; {show_size(step.uploaded_bytes)} up, "
        f"{show_size(step.downloaded_bytes)} down",
        step.roofline_line(),
        f"the GPU waits for: {stalls}",
    ]
    if question.clipping > 0:
        lines.append(f"steps in which clipping acts: {case.clipped_step.seconds:.3f} s")
    return lines


def _length_lines(found: Sequence[tuple[int, Answer | DoesNotFitError]]) -> list[str]:
    """A line per number of GPUs that share a sequence."""
    lines = ["longest sequences that fit:", "GPUs per sequence      tokens   activations       step    tokens/s"]
    for size, one in found:
        if isinstance(one, DoesNotFitError):
            lines.append(f"{size:17}   none: {one}")
            continue
        length, step = one.question.workload.length, one.chosen.step
        lines.append(
            f"{size:17}   {length:9,}   {show_size(one.chosen.plan.tide_peak_bytes):>11}   {step.seconds:>8.3f} s "
            f"{one.tokens_per_second:9,.0f}"
        )
    return lines if found else []


def _position_lines(answer: Answer) -> list[str]:
    length, there = answer.question.workload.length, answer.num_positions
    if there is None or length <= there:
        return []
    return [
        f"{length} tokens are more than the {there} positions of the model's configuration: memory and time are "
        "these, what it learns depends on how its positions are scaled"
    ]


def _attention_lines(answer: Answer) -> list[str]:
    choice, size = answer.attention, answer.question.workload.sequence_ranks
    if choice is None:
        return []
    return [
        f"{size} GPUs share each sequence, mode {choice.mode.value}: attention by {choice.reason}, of which GPUs wait "
        f"{show_seconds(choice.exposed_seconds)} for each other"
    ]


def _stash_lines(case: Case) -> list[str]:
    if not case.stashed_bytes:
        return []
    return [f"activations that leave the device: {show_size(case.stashed_bytes)}, on the host until their backward"]


def _trained(answer: Answer) -> str:
    return "" if answer.num_trained == answer.num_params else f", {answer.num_trained / 1e6:.1f} M of them trained,"


def _work(question: Question) -> str:
    work, accumulation = question.workload, question.setting.accumulation
    parts = [f"batch {work.batch} x {work.length} tokens in {work.precision}"]
    parts += [f"{accumulation} backwards for each step"] if accumulation > 1 else []
    parts += [f"LoRA of rank {work.lora_rank}"] if work.lora_rank else []
    parts += ["the loss without logits"] if work.loss is LossComputation.FUSED else []
    parts += [f"MLPs and norms in tiles of {work.tile_tokens} tokens"] if work.tile_tokens else []
    parts.append("activations are computed again" if work.checkpointing else "activations are kept")
    return ", ".join(parts)


def _cluster_lines(answer: Answer) -> list[str]:
    cluster, machine, step = answer.question.cluster, answer.question.machine, answer.chosen.step
    if cluster.num_ranks == 1:
        return []
    link = f", {cluster.link.name} between nodes" if cluster.nodes > 1 else ""
    return [
        f"on {cluster.num_ranks} GPUs, {cluster.gpus_per_node} per node{link}; all figures but tokens/s are one GPU's",
        f"between GPUs {show_size(step.gathered_bytes)} gathered at {cluster.gather_gbps(machine):.0f} GB/s, "
        f"{show_size(step.scattered_bytes)} scattered at {cluster.scatter_gbps(machine):.0f} GB/s, "
        f"{cluster.latency_seconds * 1e6:.0f} us for each",
    ]


def _refusal_lines(question: Question, refusal: DoesNotFitError) -> list[str]:
    return [f"does not fit: {refusal}", _work(question), _budgets(question)]


def _budgets(question: Question) -> str:
    device, host = question.setting.device_bytes, question.setting.host_bytes
    return (
        f"budgets: {show_size(device)} of the {question.machine.name}'s {show_size(question.machine.gpu_bytes)}, "
        f"{show_size(host)} of host memory (--device-memory, --host-memory; by default what an engine would take of "
        "that GPU and of this machine)"
    )


def _advice_lines(advice: Sequence[Advice], found: Answer | DoesNotFitError) -> list[str]:
    fits = isinstance(found, Answer)
    if not advice:
        return ["nothing that was tried makes it faster by 1 %"] if fits else ["nothing that was tried makes it fit"]
    head = "what would help, each planned again:" if fits else "what would fit, each planned:"
    return [head, *(f"  {item}" for item in advice)]


def _comparison(answers: Sequence[Answer | DoesNotFitError], questions: Sequence[Question]) -> list[str]:
    """A line per number of GPUs."""
    lines = ["GPUs   nodes   step      model TFLOPS per GPU   what bounds it"]
    for found, question in zip(answers, questions, strict=True):
        head = f"{question.cluster.num_ranks:4}   {question.cluster.nodes:5}   "
        if isinstance(found, DoesNotFitError):
            lines.append(f"{head}does not fit: {found}")
            continue
        step = found.chosen.step
        tflops = found.model_flops / step.seconds / 1e12
        lines.append(f"{head}{step.seconds:.3f} s   {tflops:20.0f}   {step.bound.replace('_', ' ')}")
    return lines


def _length_as_dict(found: Answer | DoesNotFitError) -> dict[str, Any]:
    if isinstance(found, DoesNotFitError):
        return {"fits": False, "why": str(found)}
    return {
        "fits": True,
        "seq_len": found.question.workload.length,
        "tide_peak_bytes": found.chosen.plan.tide_peak_bytes,
        "step_seconds": found.chosen.step.seconds,
        "tokens_per_second": found.tokens_per_second,
    }


def _attention_as_dict(choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {
        "mode": choice.mode.value,
        "reason": choice.reason,
        "layer_seconds": choice.seconds,
        "exposed_layer_seconds": choice.exposed_seconds,
    }


def _as_dict(found: Answer | DoesNotFitError) -> dict[str, Any]:
    """In JSON's types, as ``--json`` prints it."""
    if isinstance(found, DoesNotFitError):
        least = {"least_device_bytes": found.least_device_bytes, "least_host_bytes": found.least_host_bytes}
        return {"fits": False, "why": str(found), **least}
    question, case, step = found.question, found.chosen, found.chosen.step
    return {
        "num_parameters": found.num_params,
        "num_trained_parameters": found.num_trained,
        "machine": question.machine.name,
        "nodes": question.cluster.nodes,
        "gpus_per_node": question.cluster.gpus_per_node,
        "link": question.cluster.link.name,
        "batch_size": question.workload.batch,
        "seq_len": question.workload.length,
        "sequence_parallel": question.workload.sequence_ranks,
        "attention": _attention_as_dict(found.attention),
        "fused_loss": question.workload.loss is LossComputation.FUSED,
        "tile_tokens": question.workload.tile_tokens,
        "gradient_accumulation": question.setting.accumulation,
        "fits": True,
        "device_budget_bytes": question.setting.device_bytes,
        "host_budget_bytes": question.setting.host_bytes,
        "chosen_host_budget_bytes": case.setting.host_bytes,
        "chosen_margin_use_ratio": case.setting.margin_use_ratio,
        "least_device_bytes": case.least_device_bytes,
        "least_host_bytes": case.least_host_bytes,
        "chunk_numel": case.chunk_numel,
        "num_chunks": len(case.plan.chunks),
        "num_device_state_chunks": case.num_device_state_chunks,
        "num_speculated_chunks": case.num_speculated_chunks,
        "num_parameters_first": case.num_parameters_first,
        "tide_peak_bytes": case.plan.tide_peak_bytes,
        "stashed_bytes": case.stashed_bytes,
        "device_peak_bytes": step.peak_bytes,
        "host_bytes": case.host_bytes,
        "host_peak_bytes": case.host_peak_bytes,
        "step_seconds": step.seconds,
        "clipped_step_seconds": case.clipped_step.seconds,
        "tokens_per_second": found.tokens_per_second,
        "model_tflops": found.model_flops / step.seconds / 1e12,
        "uploaded_bytes": step.uploaded_bytes,
        "downloaded_bytes": step.downloaded_bytes,
        "gathered_bytes": step.gathered_bytes,
        "scattered_bytes": step.scattered_bytes,
        "roofline_seconds": step.roofline,
        "stall_seconds": step.stall_seconds,
        "bound": step.bound,
        "config": found.config(),
        "chunk_sizes": [
            {"chunk_numel": c.chunk_numel, "waste_bytes": c.waste_bytes, "step_seconds": c.step.seconds}
            for c in found.cases
        ],
    }


if __name__ == "__main__":
    sys.exit(main())

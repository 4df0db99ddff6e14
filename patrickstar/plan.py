r"""Plans, and what a step costs, without a GPU.

    python -m patrickstar.plan --model 4.3b --batch 16 --gpu-mem 24GiB --cpu-mem 102GiB --checkpointing

says whether a model fits, which chunk size wastes least, how long a step is, what bounds it and what would help;

    python -m patrickstar.plan --model 10.5b --gpu-mem 24GiB --cpu-mem 64GiB --checkpointing \\
        --nodes 4 --gpus-per-node 8 --link ib400 --also 8,256

the same for many GPUs, each of which has a batch and budgets of its own. In programs: ``engine.plan()`` gives the plan
of a running engine, :class:`Plan` saves and loads it, the configuration's ``plan`` makes a new engine start with it,
and :func:`predict` plays it on a machine of given rates.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.config import Speculation, parse_bytes
from patrickstar.machine.engine_options import bf16_master
from patrickstar.module.preprocess import SortedParams, choose_chunk_size, make_layout, plan_params
from patrickstar.planning.cluster import LINKS, Cluster, parse_link
from patrickstar.planning.machines import MACHINES, Machine, measured
from patrickstar.planning.models import PlannedModel, build_model
from patrickstar.planning.prediction import Case, Prediction, Setting, predict, predict_case
from patrickstar.planning.step_plan import Plan
from patrickstar.planning.uses import StepUses, trace_uses

__all__ = ["Plan", "Prediction", "Setting", "main", "predict", "predict_case"]

_GIB = 2**30
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_CHUNK_SIZES = [2**20 * size for size in (8, 16, 32, 64, 128, 256)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What the command found out."""

    num_params: int
    """Number of elements in all parameters of the model."""
    machine: Machine
    """The machine whose rates the prediction was made with."""
    setting: Setting
    """The budgets of one GPU."""
    cluster: Cluster
    """How many GPUs, and how they are connected."""
    chosen: Case
    """With the chunk size that was asked for, or the best."""
    cases: list[Case]
    """All chunk sizes that were tried and fit."""
    model_flops: float
    """Of one GPU's step, recomputation not counted."""
    clipping: float
    """The largest global norm of gradients; 0: they are not clipped."""

    def as_dict(self) -> dict[str, Any]:
        """The answer in JSON's types, as ``--json`` prints it."""
        case, step = self.chosen, self.chosen.step
        return {
            "num_parameters": self.num_params,
            "machine": self.machine.name,
            "nodes": self.cluster.nodes,
            "gpus_per_node": self.cluster.gpus_per_node,
            "link": self.cluster.link.name,
            "fits": True,
            "device_budget_bytes": self.setting.device_bytes,
            "host_budget_bytes": self.setting.host_bytes,
            "least_device_bytes": case.least_device_bytes,
            "least_host_bytes": case.least_host_bytes,
            "chunk_numel": case.chunk_numel,
            "num_chunks": len(case.plan.chunks),
            "num_device_state_chunks": case.num_device_state_chunks,
            "num_speculated_chunks": case.num_speculated_chunks,
            "tide_peak_bytes": case.plan.tide_peak_bytes,
            "device_peak_bytes": step.peak_bytes,
            "host_bytes": case.host_bytes,
            "host_peak_bytes": case.host_peak_bytes,
            "step_seconds": step.seconds,
            "clipped_step_seconds": case.clipped_step.seconds,
            "model_tflops": self.model_flops / step.seconds / 1e12,
            "uploaded_bytes": step.uploaded_bytes,
            "downloaded_bytes": step.downloaded_bytes,
            "gathered_bytes": step.gathered_bytes,
            "scattered_bytes": step.scattered_bytes,
            "roofline_seconds": step.roofline,
            "stall_seconds": step.stall_seconds,
            "bound": step.bound,
            "chunk_sizes": [
                {"chunk_numel": c.chunk_numel, "waste_bytes": c.waste_bytes, "step_seconds": c.step.seconds}
                for c in self.cases
            ],
        }

    def __str__(self) -> str:
        case, step = self.chosen, self.chosen.step
        stalls = ", ".join(f"{name.replace('_', ' ')} {s * 1e3:.0f} ms" for name, s in step.stall_seconds.items())
        lines = [
            f"{self.num_params / 1e9:.2f} B parameters on {self.machine.name} ({self.machine.source})",
            *self._cluster_lines(),
            f"fits: device {_gib(step.peak_bytes)} of {_gib(self.setting.device_bytes)} (activations "
            f"{_gib(case.plan.tide_peak_bytes)}), host {_gib(case.host_bytes)} and at its peak "
            f"{_gib(case.host_peak_bytes)} of {_gib(self.setting.host_bytes)}",
            f"least that works, all optimizer states on the host: gpu-mem {_gib(case.least_device_bytes)}, cpu-mem "
            f"{_gib(case.least_host_bytes)} "
            f"({case.least_host_bytes * self.cluster.num_ranks / self.num_params:.1f} bytes per parameter)",
            f"placement: {case.num_device_state_chunks} of {len(case.plan.chunks)} chunks have their optimizer states "
            f"on the GPU; {case.num_speculated_chunks} are updated during backward",
            "chunk size   at most held for nothing   least gpu-mem   up per step   step",
        ]
        lines += [
            f"{c.chunk_numel / 2**20:7.1f} Mi   {c.waste_bytes / 2**20:15.1f} MiB       "
            f"{_gib(c.least_device_bytes):>13}   {_gib(c.step.uploaded_bytes):>11}   {c.step.seconds:.3f} s"
            + ("   <- this plan" if c.chunk_numel == case.chunk_numel else "")
            for c in self.cases
        ]
        lines += [
            f"step {step.seconds:.3f} s, {self.model_flops / step.seconds / 1e12:.0f} model TFLOPS; "
            f"{_gib(step.uploaded_bytes)} up, {_gib(step.downloaded_bytes)} down",
            step.roofline_line(),
            f"the GPU waits for: {stalls}",
            f"what would help: {step.what_helps}",
        ]
        if self.clipping > 0:
            lines.append(f"steps in which clipping acts: {case.clipped_step.seconds:.3f} s")
        return "\n".join(lines)

    def _cluster_lines(self) -> list[str]:
        cluster, step = self.cluster, self.chosen.step
        if cluster.num_ranks == 1:
            return []
        link = f", {cluster.link.name} between nodes" if cluster.nodes > 1 else ""
        return [
            f"on {cluster.num_ranks} GPUs, {cluster.gpus_per_node} per node{link}; all figures are one GPU's",
            f"between GPUs {_gib(step.gathered_bytes)} gathered at {cluster.gather_gbps(self.machine):.0f} GB/s, "
            f"{_gib(step.scattered_bytes)} scattered at {cluster.scatter_gbps(self.machine):.0f} GB/s, "
            f"{cluster.latency_seconds * 1e6:.0f} us for each",
        ]


def answer(
    model: PlannedModel,
    *,
    compute_dtype: torch.dtype,
    machine: Machine,
    setting: Setting,
    clusters: Sequence[Cluster] = (Cluster(),),
    chunk_numel: int | None = None,
    clipping: float = 0.0,
) -> list[Answer | _C.MemoryBudgetError]:
    """Everything the command prints, for each cluster; the error where it does not fit. ``chunk_numel``: elements per
    chunk, None: the size with the shortest step.
    """
    module = model.module
    num_params = sum(param.numel() for param in module.parameters())
    params = plan_params(module, compute_dtype, use_cpu_embedding=False)
    sizes = _sizes(module, params, setting, chunk_numel)
    uses = trace_uses(module, params, compute_dtype, model.inputs, machine.gpu)
    batch, length = model.inputs["input_ids"].shape
    answers: list[Answer | _C.MemoryBudgetError] = []
    for cluster in clusters:
        cases, refusals = _cases(uses, params, sizes, machine, setting, cluster)
        if not cases:
            answers.append(refusals[0])
            continue
        answers.append(
            Answer(
                num_params=num_params,
                machine=machine,
                setting=setting,
                cluster=cluster,
                chosen=_best(cases),
                cases=cases,
                model_flops=model.model_flops(num_params, batch, length),
                clipping=clipping,
            )
        )
    return answers


def _cases(
    uses: StepUses, params: SortedParams, sizes: Sequence[int], machine: Machine, setting: Setting, cluster: Cluster
) -> tuple[list[Case], list[_C.MemoryBudgetError]]:
    """What becomes of the chunk sizes that fit, and why the others do not."""
    master = bf16_master(setting.speculation, cluster.num_ranks)
    cases, refusals = [], []
    for size in sizes:
        try:
            layout = make_layout(params, size, cluster.num_ranks, bf16_master=master)
            cases.append(predict_case(uses, layout, machine, setting, cluster))
        except _C.MemoryBudgetError as refusal:
            refusals.append(refusal)
    return cases, refusals


def _sizes(module: nn.Module, params: SortedParams, setting: Setting, chunk_numel: int | None) -> list[int]:
    """The chunk sizes to try: an engine itself makes the one that it is given smaller on a scarce device."""
    asked = _CHUNK_SIZES if chunk_numel is None else [chunk_numel]
    return sorted({choose_chunk_size(params, module, size, setting.device_bytes).numel for size in asked})


def _best(cases: list[Case]) -> Case:
    """The least waste among those whose steps are as short as any, as far as the simulator can tell (0.5 %)."""
    shortest = min(case.step.seconds for case in cases)
    return min((c for c in cases if c.step.seconds <= 1.005 * shortest), key=lambda case: case.waste_bytes)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m patrickstar.plan", description="Will it fit, how long is a step, and what bounds it?"
    )
    parser.add_argument(
        "--model", required=True, help="gpt:HIDDENxLAYERS, 4.3b, or a Hugging Face config.json or folder"
    )
    parser.add_argument("--batch", type=int, default=16, help="sequences per step and GPU")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--gpu", choices=MACHINES, default="h200", help="whose rates to use")
    parser.add_argument("--gpu-mem", help="device_memory of each engine, such as 24GiB (default: 80 %% of the GPU's)")
    parser.add_argument("--cpu-mem", required=True, help="host_memory of each engine, such as 102GiB")
    parser.add_argument("--nodes", type=int, default=1, help="of GPUs that share each chunk (default: 1)")
    parser.add_argument("--gpus-per-node", type=int, default=1, help="connected by NVLink (default: 1)")
    parser.add_argument(
        "--link", default="nvlink", help=f"between nodes: {', '.join(LINKS)}, or GB/s for each GPU (default: nvlink)"
    )
    parser.add_argument("--also", metavar="GPUS", help="other numbers of GPUs to tell the step of, such as 8,32,256")
    parser.add_argument("--chunk-numel", default="auto", help="elements per chunk (default: auto)")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument(
        "--margin-use-ratio", type=float, default=0.95, help="client.mem_tracer.margin_use_ratio (default: 0.95)"
    )
    parser.add_argument(
        "--speculation",
        choices=[member.value for member in Speculation],
        default=Speculation.AUTO.value,
        help="optimizer.speculation",
    )
    parser.add_argument("--clipping", type=float, default=0.0, help="gradient_clipping")
    parser.add_argument("--precision", choices=_DTYPES, default="bf16")
    parser.add_argument("--measure", action="store_true", help="measure this machine's link and Adam instead")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--save", metavar="PATH", help="also write the plan there")
    return parser


def _chunk_numel(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1024:
        raise ValueError(f"--chunk-numel is {text!r}; give auto or at least 1024 elements")
    return int(text)


def _clusters(args: argparse.Namespace) -> list[Cluster]:
    """What was asked for, then the others."""
    if args.nodes < 1 or args.gpus_per_node < 1:
        raise ValueError(f"--nodes is {args.nodes} and --gpus-per-node {args.gpus_per_node}; give at least 1")
    cluster = Cluster(nodes=args.nodes, gpus_per_node=args.gpus_per_node, link=parse_link(args.link))
    sizes = (args.also or "").split(",") if args.also else []
    if not all(size.isdigit() for size in sizes):
        raise ValueError(f"--also is {args.also!r}; give numbers of GPUs, such as 8,32,256")
    return [cluster, *(cluster.of_size(int(size)) for size in sizes)]


def _run(args: argparse.Namespace) -> list[Answer | _C.MemoryBudgetError]:
    if args.batch < 1 or args.length < 1:
        raise ValueError(f"--batch is {args.batch} and --length {args.length}; give at least 1")
    if not 0 < args.margin_use_ratio <= 1:
        raise ValueError(f"--margin-use-ratio is {args.margin_use_ratio}; give more than 0 and at most 1")
    machine = MACHINES[args.gpu]
    device_bytes = parse_bytes(args.gpu_mem, "--gpu-mem") if args.gpu_mem else int(0.8 * machine.gpu_bytes)
    setting = Setting(
        device_bytes=device_bytes,
        host_bytes=parse_bytes(args.cpu_mem, "--cpu-mem"),
        margin_use_ratio=args.margin_use_ratio,
        speculation=Speculation(args.speculation),
    )
    chunk_numel = _chunk_numel(args.chunk_numel)
    clusters = _clusters(args)
    if args.measure:
        machine = measured(machine)
    model = build_model(args.model, args.batch, args.length, checkpointing=args.checkpointing)
    return answer(
        model,
        compute_dtype=_DTYPES[args.precision],
        machine=machine,
        setting=setting,
        clusters=clusters,
        chunk_numel=chunk_numel,
        clipping=args.clipping,
    )


def _comparison(answers: Sequence[Answer | _C.MemoryBudgetError], clusters: Sequence[Cluster]) -> list[str]:
    """A line per number of GPUs."""
    lines = ["GPUs   nodes   step      model TFLOPS per GPU   what bounds it"]
    for found, cluster in zip(answers, clusters, strict=True):
        head = f"{cluster.num_ranks:4}   {cluster.nodes:5}   "
        if not isinstance(found, Answer):
            lines.append(f"{head}does not fit: {found}")
            continue
        step = found.chosen.step
        tflops = found.model_flops / step.seconds / 1e12
        lines.append(f"{head}{step.seconds:.3f} s   {tflops:20.0f}   {step.bound.replace('_', ' ')}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0, 1 when the model does not fit, 2 when an argument is wrong."""
    args = _parser().parse_args(argv)
    try:
        answers = _run(args)
    except ValueError as error:
        print(f"python -m patrickstar.plan: {error}", file=sys.stderr)
        return 2
    found = answers[0]
    fits = isinstance(found, Answer)
    if args.save and isinstance(found, Answer):
        found.chosen.plan.save(args.save)
    if args.json:
        print(
            json.dumps(
                {**_as_dict(found), **({"also": [_as_dict(other) for other in answers[1:]]} if args.also else {})}
            )
        )
    else:
        print(found if fits else f"does not fit: {found}")
        if args.also:
            print("\n".join(_comparison(answers, _clusters(args))))
    return 0 if fits else 1


def _as_dict(found: Answer | _C.MemoryBudgetError) -> dict[str, Any]:
    return found.as_dict() if isinstance(found, Answer) else {"fits": False, "why": str(found)}


if __name__ == "__main__":
    sys.exit(main())

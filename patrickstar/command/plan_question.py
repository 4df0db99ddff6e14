"""The question to the planner that the arguments of ``patrickstar plan`` ask."""

from __future__ import annotations

import argparse
import dataclasses

from patrickstar.choices import (
    ActivationOffload,
    Fp8Recipe,
    LossComputation,
    Master,
    MatrixMode,
    QuantizationType,
    Recompute,
    Speculation,
    States,
)
from patrickstar.command.plan_flags import OPTIMIZERS, mesh_shape
from patrickstar.machine import host_memory
from patrickstar.machine.budgets import expected_device_bytes
from patrickstar.planning import defaults
from patrickstar.planning.cluster import Cluster
from patrickstar.planning.images import Images, image_size
from patrickstar.planning.machines import MACHINES, Machine, given_disk, given_gpu, given_host, measured
from patrickstar.planning.models import whole_model
from patrickstar.planning.question import Question, Workload
from patrickstar.planning.setting import Setting
from patrickstar.planning.sharded_matrices import MatrixMesh, cheapest_mesh
from patrickstar.tensor2d.cost import Mode

_GRAIN = 2**28


def question_of(args: argparse.Namespace) -> Question:
    """Returns the question of checked arguments.

    Raises:
        ValueError: a model cannot be divided as asked.
    """
    machine = _machine(args)
    cluster = Cluster(nodes=args.nodes, gpus_per_node=args.gpus_per_node, link=args.link)
    batch, length = args.batch_size or defaults.BATCH, args.seq_len or defaults.LENGTH
    return Question(
        workload=Workload(
            model=args.model,
            batch=batch,
            length=length,
            checkpointing=args.checkpointing,
            lora_rank=args.lora_rank or (0 if args.quantization is None else defaults.LORA_RANK),
            quantization=None if args.quantization is None else QuantizationType(args.quantization),
            fp8=None if args.fp8 is None else Fp8Recipe(args.fp8),
            precision=args.precision,
            loss=LossComputation.FUSED if args.fused_loss else LossComputation.WHOLE,
            tile_tokens=args.tile_tokens,
            sequence_ranks=args.sequence_parallel,
            mesh=_mesh(args, cluster, batch, length),
            images=_images(args),
            expert_ranks=args.expert_parallel,
        ),
        machine=machine,
        setting=Setting(
            device_bytes=args.device_memory or _usual_device_bytes(machine, cluster),
            host_bytes=args.host_memory or _in_words(host_memory.default_budget_bytes()),
            disk_bytes=args.disk or 0,
            margin_use_ratio=args.margin_use_ratio,
            speculation=Speculation(args.speculation),
            optimizer=OPTIMIZERS[args.optimizer],
            states=States(args.states),
            master=Master(args.master),
            accumulation=args.gradient_accumulation,
            offload=ActivationOffload(args.offload),
            recompute=Recompute(args.recompute),
        ),
        cluster=cluster,
        chunk_numel=args.chunk_numel,
        clipping=args.clip,
    )


def questions_of_sizes(question: Question, sizes: list[int]) -> list[Question]:
    """Returns the question for other numbers of GPUs."""
    return [dataclasses.replace(question, cluster=question.cluster.of_size(size)) for size in sizes]


def _images(args: argparse.Namespace) -> Images | None:
    return Images(args.images, *(args.image_size or image_size(defaults.IMAGE_SIZE))) if args.images else None


def _mesh(args: argparse.Namespace, cluster: Cluster, batch: int, length: int) -> MatrixMesh | None:
    text, mode = args.tensor_parallel, MatrixMode(args.tensor_mode)
    if text is None:
        return None
    if args.sequence_parallel > 1:
        mode = MatrixMode.TWO
    given = None if mode is MatrixMode.AUTO else Mode(mode.value)
    shape = mesh_shape(text)
    if shape is not None:
        return MatrixMesh(mode=given or Mode.TWO, rows=shape[0], columns=shape[1])
    ranks = max(cluster.num_ranks // args.sequence_parallel, 1) if text == "auto" else int(text)
    if ranks == 1:
        return None
    here = -(-length // args.sequence_parallel)
    return cheapest_mesh(whole_model(args.model, length), batch, here, ranks, given)


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

"""Questions to a planner: workload, machine and budgets."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from patrickstar.config import Fp8Config, Fp8Recipe, LossComputation, QuantizationType
from patrickstar.module.fp8_layers import Fp8Layers
from patrickstar.module.fused_experts import fuse_experts
from patrickstar.module.tiled_modules import tile_modules
from patrickstar.planning.cluster import Cluster
from patrickstar.planning.gpus import DATA_SHEETS, precision_mistake
from patrickstar.planning.images import Images
from patrickstar.planning.machines import H200, Gpu, Machine
from patrickstar.planning.models import SharedSequences
from patrickstar.planning.planned_experts import SharedExperts
from patrickstar.planning.setting import Setting
from patrickstar.planning.sharded_matrices import MatrixMesh, SharedMatrices
from patrickstar.sequence.choice import Links
from patrickstar.sequence.fused_loss import fuse_loss

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Forward and backward of one GPU, or of a group of GPUs that shares sequences or matrices."""

    model: str
    """Name or path of the model, as in ``--model``."""
    batch: int
    """Sequences."""
    length: int
    """Tokens of each sequence."""
    checkpointing: bool = False
    """Recomputation of activations in backward."""
    lora_rank: int = 0
    """Rank of the adapters; only they are trained. 0: everything is trained."""
    quantization: QuantizationType | None = None
    """Storage of frozen linear layers' weights (``quantization.type``); None: the compute dtype."""
    fp8: Fp8Recipe | None = None
    """Recipe of linear layers and experts that multiply in 8 bits (``fp8.recipe``); None: none does."""
    precision: str = "bf16"
    """Compute dtype, a key of :data:`DTYPES`."""
    loss: LossComputation = LossComputation.WHOLE
    """Part of the logits that exists at a time (``activations.loss``)."""
    tile_tokens: int = 0
    """Tokens per tile of MLPs and norms (``activations.tile_tokens``); 0: no tiles."""
    sequence_ranks: int = 1
    """Adjacent GPUs that share each sequence (``sequence_parallel.size``)."""
    mesh: MatrixMesh | None = None
    """Adjacent GPUs that share matrices (``tensor_parallel``); None: each has whole matrices."""

    images: Images | None = None
    """Images of each sequence; None: text alone."""
    expert_ranks: int = 1
    """Adjacent GPUs that divide experts (``expert_parallel.size``)."""

    @property
    def batch_unit(self) -> int:
        """Batches are multiples of it."""
        return 1 if self.mesh is None else self.mesh.rows

    @property
    def sharing_ranks(self) -> int:
        """GPUs that compute the same batch together."""
        return self.sequence_ranks * (1 if self.mesh is None else self.mesh.size)

    def change(self, module: nn.Module, experts_exclusion: str | None = None) -> None:
        """Changes ``module`` after tensor parallelism as an engine does (``patrickstar/activations/remedies.py``).

        Args:
            experts_exclusion: reason why the GPU multiplies experts in 16 bits with ``fp8``; None: it need not.

        Raises:
            ValueError: its loss cannot be fused, none of its layers can multiply in 8 bits, or none of its modules can
                be tiled.
        """
        if self.loss is LossComputation.FUSED and self.mesh is None:  # tensor parallelism has its own loss
            fuse_loss(module)
        fuse_experts(module)
        if self.fp8 is not None:
            Fp8Layers(module, Fp8Config(recipe=self.fp8), experts_exclusion)
        if self.tile_tokens:
            tile_modules(module, self.tile_tokens)

    def activations(self) -> dict[str, Any]:
        """Returns the configuration's section ``activations``; empty if all values are defaults."""
        section: dict[str, Any] = {}
        if self.loss is not LossComputation.WHOLE:
            section["loss"] = self.loss.value
        if self.tile_tokens:
            section["tile_tokens"] = self.tile_tokens
        return section


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """Everything that determines an answer."""

    workload: Workload
    machine: Machine
    setting: Setting
    """Budgets of one GPU."""
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    chunk_numel: int | None = None
    """Elements per chunk; None: the best."""
    clipping: float = 0.0
    """Largest global gradient norm; 0: no clipping."""

    @property
    def chunk_cluster(self) -> Cluster:
        """The cluster in which ranks with equal parts of the matrices share chunks."""
        mesh = self.workload.mesh
        return self.cluster if mesh is None else dataclasses.replace(self.cluster, matrix_ranks=mesh.size)

    @property
    def tokens(self) -> int:
        """Tokens of one step, on all GPUs."""
        workload = self.workload
        groups = self.cluster.num_ranks // workload.sharing_ranks
        return workload.batch * workload.length * self.setting.accumulation * groups

    def check(self) -> None:
        """Raises ValueError if the GPU does not support the precision, or if the GPUs do not divide into the workload's
        groups.
        """
        check_precision(self.workload.precision, self.machine)
        size, num_ranks = self.workload.sequence_ranks, self.cluster.num_ranks
        if num_ranks % size:
            raise ValueError(
                f"--sequence-parallel is {size}, but there are {num_ranks} GPUs, which are not groups of {size}; give "
                f"--gpus-per-node {size}, or another size"
            )
        mesh = self.workload.mesh
        if mesh is not None and num_ranks % mesh.size:
            raise ValueError(
                f"--tensor-parallel is {mesh.rows}x{mesh.columns}, but there are {num_ranks} GPUs, which are not "
                f"groups of {mesh.size}; give --gpus-per-node {mesh.size}, or another mesh"
            )
        experts = self.workload.expert_ranks
        if num_ranks % experts:
            raise ValueError(
                f"--expert-parallel is {experts}, but there are {num_ranks} GPUs, which are not groups of {experts}; "
                f"give --gpus-per-node {experts}, or another size"
            )
        together = self.workload.sharing_ranks
        if mesh is not None and num_ranks % together:
            raise ValueError(
                f"--tensor-parallel {mesh.rows}x{mesh.columns} and --sequence-parallel {size} take {together} GPUs "
                f"together, but there are {num_ranks}; give --gpus-per-node {together}, or less of one of them"
            )

    def change(self, module: nn.Module) -> None:
        """``Workload.change`` for the machine's GPU."""
        sheet = DATA_SHEETS.get(self.machine.name)
        has_groups = sheet is None or sheet.has_grouped_float8
        self.workload.change(module, None if has_groups else f"experts, not in 8 bits on {self.machine.name}")

    @property
    def gpu(self) -> Gpu:
        """The machine's rates for the workload's recipe of products in 8 bits."""
        recipe = self.workload.fp8
        gpu = self.machine.gpu
        return gpu if recipe is None else dataclasses.replace(gpu, float8_speedup=_FLOAT8_SPEEDUPS[recipe])

    def shared_sequences(self) -> SharedSequences | None:
        """Returns the sequence parallelism with the machine's rates; None: there is none."""
        workload = self.workload
        if workload.sequence_ranks == 1:
            return None
        gpu, dtype = self.machine.gpu, DTYPES[workload.precision]
        tflops = Links.attention_tflops * gpu.attention_tflops / H200.gpu.attention_tflops
        links = Links(
            attention_tflops=min(tflops, gpu.matmul_flops(dtype.itemsize) / 1e12),
            gbps=self.cluster.pass_on_gbps(
                self.machine, workload.sequence_ranks, 1 if workload.mesh is None else workload.mesh.size
            ),
        )
        return SharedSequences(size=workload.sequence_ranks, links=links)

    def shared_matrices(self) -> SharedMatrices | None:
        """Returns the tensor parallelism with the machine's rates; None: there is none."""
        mesh = self.workload.mesh
        return None if mesh is None else SharedMatrices.on(mesh, self.machine, self.cluster)

    def shared_experts(self) -> SharedExperts | None:
        """Returns the expert parallelism with the machine's rates; None: there is none."""
        size = self.workload.expert_ranks
        return None if size == 1 else SharedExperts(size=size, rates=self.cluster.line_rates(self.machine, size, 1))


_FLOAT8_SPEEDUPS = {Fp8Recipe.BLOCK: 1.31, Fp8Recipe.ROWWISE: 1.74, Fp8Recipe.TENSORWISE: 1.79}
"""All products of a Llama-3.1-8B layer, by those in bfloat16 (benchmark/results/h200-fp8.txt)."""


def check_precision(precision: str, machine: Machine) -> None:
    """Raises ValueError if the GPU does not support the precision."""
    mistake = precision_mistake(precision, machine.name, machine.precisions)
    if mistake is not None:
        raise ValueError(mistake)

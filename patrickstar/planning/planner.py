"""Answers: what a training run is planned to be, for questions that differ in a part, such as more memory or a batch of
another size. What answers have in common (the model's trace, its layouts) is made once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from patrickstar import _C
from patrickstar.config import (
    ActivationOffload,
    LossComputation,
    Master,
    QuantizationConfig,
    QuantizationType,
    Speculation,
    States,
)
from patrickstar.machine.state_scheme import choose_layout, state_scheme
from patrickstar.module.preprocess import SortedParams, choose_chunk_size, make_layout, plan_params
from patrickstar.module.tiled_modules import tile_modules
from patrickstar.planning.cluster import Cluster
from patrickstar.planning.divided_matrices import MatrixMesh, PlannedMatrices, SharedMatrices
from patrickstar.planning.machines import H200, Machine
from patrickstar.planning.models import PlannedModel, SharedSequences, build_model
from patrickstar.planning.prediction import Case, Predictor
from patrickstar.planning.setting import DoesNotFitError, Setting
from patrickstar.planning.shortest_step import ShortestStep, shortest_cases
from patrickstar.planning.uses import StepUses, trace_uses
from patrickstar.sequence.choice import Choice, Links
from patrickstar.sequence.fused_loss import fuse_loss
from patrickstar.sizes import enough_size, parse_size

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CHUNK_SIZES = tuple(2**20 * size for size in (8, 16, 32, 64, 128, 256))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What one GPU computes in a forward and its backward, or several that share sequences."""

    model: str
    """As ``--model`` takes it."""
    batch: int
    """Sequences."""
    length: int
    """Tokens of each."""
    checkpointing: bool = False
    """Whether activations are computed again in backward."""
    lora_rank: int = 0
    """Of the adapters that alone are trained; 0: everything is."""
    quantization: QuantizationType | None = None
    """What frozen weights of linear layers are stored in (``quantization.type``); None: the compute dtype."""
    precision: str = "bf16"
    """Of compute, a key of :data:`DTYPES`."""
    loss: LossComputation = LossComputation.WHOLE
    """How much of the logits exists at a time (``activations.loss``)."""
    tile_tokens: int = 0
    """Of each tile in which MLPs and norms are computed (``activations.tile_tokens``); 0: all tokens at once."""
    sequence_ranks: int = 1
    """GPUs that share each sequence (``sequence_parallel.size``), neighbours."""
    mesh: MatrixMesh | None = None
    """GPUs that share matrices (``tensor_parallel``), neighbours; None: each has whole ones."""

    @property
    def batch_unit(self) -> int:
        """What batches are multiples of."""
        return 1 if self.mesh is None else self.mesh.rows

    @property
    def sharing_ranks(self) -> int:
        """GPUs that compute the same batch together."""
        return self.sequence_ranks * (1 if self.mesh is None else self.mesh.size)

    def change(self, module: nn.Module) -> None:
        """Makes of ``module``, whose matrices are divided, what an engine makes of it
        (``patrickstar/engine/activations.py``).

        Raises:
            ValueError: its loss cannot be fused, or nothing of it can be computed in tiles.
        """
        if self.loss is LossComputation.FUSED and self.mesh is None:  # [Note: a divided loss]
            fuse_loss(module)
        if self.tile_tokens:
            tile_modules(module, self.tile_tokens)

    def activations(self) -> dict[str, Any]:
        """The configuration's section ``activations``; empty where nothing differs from its defaults."""
        section: dict[str, Any] = {}
        if self.loss is not LossComputation.WHOLE:
            section["loss"] = self.loss.value
        if self.tile_tokens:
            section["tile_tokens"] = self.tile_tokens
        return section


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """All that an answer depends on."""

    workload: Workload
    machine: Machine
    setting: Setting
    """Budgets of one GPU."""
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    chunk_numel: int | None = None
    """Elements per chunk; None: the best."""
    clipping: float = 0.0
    """The largest global norm of gradients; 0: they are not clipped."""

    @property
    def chunk_cluster(self) -> Cluster:
        """The cluster, in which only ranks with the same of each matrix share chunks."""
        mesh = self.workload.mesh
        return self.cluster if mesh is None else dataclasses.replace(self.cluster, matrix_ranks=mesh.size)

    @property
    def tokens(self) -> int:
        """Of one step, on all GPUs."""
        workload = self.workload
        groups = self.cluster.num_ranks // workload.sharing_ranks
        return workload.batch * workload.length * self.setting.accumulation * groups


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """Between ranks that share matrices, for one forward and its backward."""

    received_bytes: int
    """By each rank."""
    link_seconds: float
    """For which a rank's link is busy."""
    exposed_seconds: float
    """Of these, what products did not hide, and latencies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What becomes of a question whose model fits."""

    question: Question
    num_params: int
    """Elements of all parameters."""
    num_trained: int
    """Elements of those that are trained."""
    chosen: Case
    """With the chunk size that was asked for, or the best."""
    cases: list[Case]
    """All chunk sizes that were tried and fit."""
    model_flops: float
    """Of one GPU's step, recomputation not counted."""
    num_positions: int | None = None
    """Of the model's configuration; None: it says none."""
    attention: Choice | None = None
    """How attention over sequences that ranks share is computed, for one layer; None: each has its own."""
    exchanged: Exchanged | None = None
    """What ranks that share matrices send each other; None: each has whole ones."""

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.question.tokens / self.chosen.step.seconds

    def config(self) -> dict[str, Any]:
        """What ``initialize_engine`` takes to train so; the learning rate and its like are the user's."""
        question, setting, case = self.question, self.question.setting, self.chosen
        optimizer: dict[str, Any] = {"type": setting.optimizer.value, "params": {"lr": 1e-4}}
        if setting.speculation is not Speculation.AUTO:
            optimizer["speculation"] = setting.speculation.value
        if setting.states is not States.FP32:
            optimizer["states"] = setting.states.value
        if setting.master is not Master.EXACT:
            optimizer["master"] = setting.master.value
        config: dict[str, Any] = {
            "optimizer": optimizer,
            "device_memory": _as_written(setting.device_bytes),
            "host_memory": _as_written(case.setting.host_bytes),
            "default_chunk_size": case.chunk_numel,
        }
        if setting.disk_bytes:
            config["disk_memory"] = {"path": "/path/on/the/disk", "size": _as_written(setting.disk_bytes)}
        if self.attention is not None:
            size, mode = question.workload.sequence_ranks, self.attention.mode.value
            config["sequence_parallel"] = {"size": size, "mode": mode}
        mesh = question.workload.mesh
        if mesh is not None:
            config["tensor_parallel"] = {"rows": mesh.rows, "columns": mesh.columns, "mode": mesh.mode.value}
        activations = question.workload.activations()
        if setting.offload is not ActivationOffload.AUTO:
            activations["offload"] = setting.offload.value
        if activations:
            config["activations"] = activations
        precision = question.workload.precision
        if precision != "fp32":
            config[precision] = {"enabled": True}
        if question.workload.quantization is not None:
            config["quantization"] = {"type": question.workload.quantization.value}
        if question.clipping > 0:
            config["gradient_clipping"] = question.clipping
        if case.setting.margin_use_ratio != Setting.margin_use_ratio:
            config["client"] = {"mem_tracer": {"margin_use_ratio": case.setting.margin_use_ratio}}
        return config


@dataclasses.dataclass(frozen=True)
class _Trace:
    """A model's step, and the chunk sizes that an engine makes of those that are asked for."""

    model: PlannedModel
    params: SortedParams
    uses: StepUses
    ample_bytes: int
    scarce_numels: dict[int, int]
    exchanged: Exchanged | None


class Planner:
    """Answers questions, and keeps what the next ones may need."""

    def __init__(self) -> None:
        self._traces: dict[tuple[Any, ...], _Trace] = {}
        self._predictors: dict[tuple[Any, ...], Predictor] = {}
        self._answers: dict[Question, Answer] = {}

    def answer(self, question: Question) -> Answer:
        """The plan with the shortest step.

        Raises:
            DoesNotFitError: with no chunk size does it fit.
            ValueError: there is no such model, or the GPU has no such dtype.
        """
        if question not in self._answers:
            self._answers[question] = self._answer(question)
        return self._answers[question]

    def _answer(self, question: Question) -> Answer:
        workload = question.workload
        trace = self._checked_trace(question)
        cases, refusals = [], []
        for size in self._sizes(question, trace):
            predictor = self._predictor(question, trace, size)
            try:
                cases.append(ShortestStep(predictor).choose(question.setting))
            except DoesNotFitError as refusal:
                refusals.append(refusal)
        if not cases:
            raise refusals[0]
        flops = trace.model.model_flops(workload.batch, workload.length) * question.setting.accumulation
        division = trace.model.division
        return Answer(
            question=question,
            num_params=trace.model.num_params,
            num_trained=trace.model.num_trained,
            chosen=_best(cases),
            cases=cases,
            model_flops=flops / workload.sharing_ranks,
            num_positions=trace.model.num_positions,
            attention=None if division is None else division.choice,
            exchanged=trace.exchanged,
        )

    def refusal(self, question: Question) -> DoesNotFitError | None:
        """Why it does not fit, or None; found sooner than an answer.

        Raises:
            ValueError: as :meth:`answer`.
        """
        trace = self._checked_trace(question)
        refusals = []
        for size in self._sizes(question, trace):
            try:
                self._predictor(question, trace, size).predict(question.setting)
                return None
            except DoesNotFitError as refusal:
                refusals.append(refusal)
        return min(refusals, key=lambda refusal: refusal.least_device_bytes or 0)

    def needed_device_bytes(self, question: Question) -> int:
        """What its activations and the largest moment's chunks need of the device, of the chunk size that needs least:
        at most its ``device_memory`` where it fits.
        """
        trace = self._checked_trace(question)
        sizes = self._sizes(question, trace)
        return min(self._predictor(question, trace, size).needed_device_bytes(question.setting) for size in sizes)

    def most_tokens(self, question: Question) -> int | None:
        """Of its model's sequences, where positions are rows of a table."""
        return build_model(question.workload.model, 1, 1, checkpointing=False).most_tokens

    def _checked_trace(self, question: Question) -> _Trace:
        check_precision(question.workload.precision, question.machine)
        size, num_ranks = question.workload.sequence_ranks, question.cluster.num_ranks
        if num_ranks % size:
            raise ValueError(
                f"--sequence-parallel is {size}, but there are {num_ranks} GPUs, which are not groups of {size}; give "
                f"--gpus-per-node {size}, or another size"
            )
        mesh = question.workload.mesh
        if mesh is not None and num_ranks % mesh.size:
            raise ValueError(
                f"--tensor-parallel is {mesh.rows}x{mesh.columns}, but there are {num_ranks} GPUs, which are not "
                f"groups of {mesh.size}; give --gpus-per-node {mesh.size}, or another mesh"
            )
        together = question.workload.sharing_ranks
        if mesh is not None and num_ranks % together:
            raise ValueError(
                f"--tensor-parallel {mesh.rows}x{mesh.columns} and --sequence-parallel {size} take {together} GPUs "
                f"together, but there are {num_ranks}; give --gpus-per-node {together}, or less of one of them"
            )
        return self._trace(question)

    def _trace(self, question: Question) -> _Trace:
        workload, gpu = question.workload, question.machine.gpu
        asked = CHUNK_SIZES if question.chunk_numel is None else (question.chunk_numel,)
        shared, matrices = shared_sequences(question), shared_matrices(question)
        key = (workload, gpu, asked, shared, matrices)
        if key not in self._traces:
            model = build_model(
                workload.model,
                workload.batch,
                workload.length,
                checkpointing=workload.checkpointing,
                lora_rank=workload.lora_rank,
                prepare=workload.change,
                shared=shared,
                matrices=matrices,
            )
            dtype = DTYPES[workload.precision]
            quantization = None if workload.quantization is None else QuantizationConfig(type=workload.quantization)
            params = plan_params(model.module, dtype, use_cpu_embedding=False, quantization=quantization)
            # Before the trace, which changes the module.
            scarce = {size: choose_chunk_size(params, model.module, size, 0) for size in asked}
            self._traces[key] = _Trace(
                model,
                params,
                trace_uses(model.module, params, dtype, model.inputs, gpu, divisions=model.divisions),
                next(iter(scarce.values())).ample_bytes,
                {size: chosen.numel for size, chosen in scarce.items()},
                _exchanged(model.matrices),
            )
        return self._traces[key]

    def _sizes(self, question: Question, trace: _Trace) -> list[int]:
        """The chunk sizes to try: an engine itself makes the one that it is given smaller on a scarce device."""
        ample = question.setting.device_bytes >= trace.ample_bytes
        return sorted({asked if ample else scarce for asked, scarce in trace.scarce_numels.items()})

    def _predictor(self, question: Question, trace: _Trace, size: int) -> Predictor:
        cluster = question.chunk_cluster
        setting, optimizer = question.setting, question.setting.optimizer_config()
        layout = choose_layout(
            lambda scheme: make_layout(trace.params, size, cluster.chunk_ranks, scheme=scheme),
            optimizer,
            updates_begin_early=setting.updates_take_memory and not setting.disk_bytes,
            device_bytes=setting.device_bytes if setting.hybrid_adam else 0,
            host_bytes=setting.host_bytes,
        )
        in_place = _C.puts_values_in_place(layout)
        key = (question.workload, question.machine, cluster, size, state_scheme(optimizer), in_place)
        if key not in self._predictors:
            self._predictors[key] = Predictor(trace.uses, layout, question.machine, cluster)
        return self._predictors[key]


def shared_sequences(question: Question) -> SharedSequences | None:
    """The ranks that share a sequence, with the rates of the machine; None: each has its own."""
    workload = question.workload
    if workload.sequence_ranks == 1:
        return None
    gpu, dtype = question.machine.gpu, DTYPES[workload.precision]
    tflops = Links.attention_tflops * gpu.attention_tflops / H200.gpu.attention_tflops
    links = Links(
        attention_tflops=min(tflops, gpu.matmul_flops(dtype) / 1e12),
        gbps=question.cluster.pass_on_gbps(
            question.machine, workload.sequence_ranks, 1 if workload.mesh is None else workload.mesh.size
        ),
    )
    return SharedSequences(size=workload.sequence_ranks, links=links)


def shared_matrices(question: Question) -> SharedMatrices | None:
    """The ranks that share matrices, with the rates of the machine; None: each has whole ones."""
    mesh = question.workload.mesh
    return None if mesh is None else SharedMatrices.on(mesh, question.machine, question.cluster)


def _exchanged(matrices: PlannedMatrices | None) -> Exchanged | None:
    if matrices is None:
        return None
    return Exchanged(sum(matrices.received_bytes.values()), matrices.link_seconds, matrices.exposed_seconds)


def check_precision(precision: str, machine: Machine) -> None:
    """Raises ValueError where the GPU does not compute in it."""
    if DTYPES[precision] not in machine.compute_dtypes:
        there = [name for name, dtype in DTYPES.items() if dtype in machine.compute_dtypes]
        raise ValueError(
            f"--precision is {precision}, which {machine.name} does not compute in; give one of {', '.join(there)}"
        )


def _as_written(num_bytes: int) -> int | str:
    """As a text where that is exact."""
    text = enough_size(num_bytes)
    return text if parse_size(text) == num_bytes else num_bytes


def _best(cases: list[Case]) -> Case:
    """The least waste among those whose steps are as short as any, as far as the simulator can tell."""
    return min(shortest_cases(cases), key=lambda case: case.waste_bytes)

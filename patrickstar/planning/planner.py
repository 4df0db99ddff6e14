"""Answers questions about training runs. Questions may differ in a part, such as the memory or the batch size; traces
and layouts are shared between them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from torch import nn

from patrickstar import _C
from patrickstar.config import ActivationOffload, Master, QuantizationConfig, Recompute, Speculation, States
from patrickstar.machine.state_scheme import choose_layout, state_scheme
from patrickstar.module.layouts import choose_chunk_size, make_layout, working_sets
from patrickstar.module.preprocess import SortedParams, plan_params
from patrickstar.planning.case import Case
from patrickstar.planning.models import PlannedModel, build_model
from patrickstar.planning.planned_recomputation import Search, may_pay, shortest_recomputation
from patrickstar.planning.predicted_step import Prediction
from patrickstar.planning.prediction import Predictor
from patrickstar.planning.question import DTYPES, Question
from patrickstar.planning.recomputation import choose_roughly, choose_rung
from patrickstar.planning.setting import DoesNotFitError, Setting
from patrickstar.planning.shortest_step import ShortestStep, host_bytes_for_values_in_place, shortest_cases
from patrickstar.planning.step_uses import StepUses
from patrickstar.planning.uses import trace_uses
from patrickstar.sequence.choice import Choice
from patrickstar.sizes import enough_size, parse_size

CHUNK_SIZES = tuple(2**20 * size for size in (8, 16, 32, 64, 128, 256))


@dataclasses.dataclass(frozen=True)
class _Effort:
    """Amount of search for an answer."""

    num_searched: int
    """Chunk sizes, those with the shortest steps, for which budgets with a shorter step are searched."""
    choose: Search
    """Chooses the recomputation."""


_THOROUGH = _Effort(2, choose_rung)
_ROUGH = _Effort(0, choose_roughly)


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """Exchanges between tensor-parallel ranks, for one forward and its backward."""

    received_bytes: int
    """Bytes that each rank receives."""
    link_seconds: float
    """Busy seconds of a rank's link."""
    exposed_seconds: float
    """Seconds of these not hidden by products, and latencies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The plan of a model that fits."""

    question: Question
    num_params: int
    """Elements of all parameters."""
    num_trained: int
    """Elements of trained parameters."""
    num_active: int
    """Elements that compute for each token: neither experts to which it is not sent nor towers of images and sound."""
    num_unused: int
    """Elements that the step does not use, such as a vision tower's if it is planned for text."""
    num_image_tokens: int
    """Tokens of each sequence that stand for its images."""
    chosen: Case
    """The case of the requested chunk size, or the best."""
    all_recomputed: Prediction | None
    """The step in which all checkpointed layers are recomputed; None: none is checkpointed, or all are recomputed."""
    cases: list[Case]
    """All chunk sizes that were tried and fit, with all checkpointed layers recomputed."""
    model_flops: float
    """FLOPs of one GPU's step without recomputation."""
    num_positions: int | None = None
    """Positions in the model's configuration; None: not given."""
    attention: Choice | None = None
    """Attention algorithm of sequence parallelism, for one layer; None: each rank has its own sequences."""
    exchanged: Exchanged | None = None
    """Exchanges of tensor or expert parallelism; None: there are none."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs together."""
        return self.question.tokens / self.chosen.step.seconds

    def config(self) -> dict[str, Any]:
        """Returns the configuration for ``initialize_engine``; the user sets the learning rate and similar values."""
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
        if question.workload.expert_ranks > 1:
            config["expert_parallel"] = {"size": question.workload.expert_ranks}
        activations = question.workload.activations()
        if setting.offload is not ActivationOffload.AUTO:
            activations["offload"] = setting.offload.value
        if setting.recompute is not Recompute.AUTO:
            activations["recompute"] = setting.recompute.value
        if activations:
            config["activations"] = activations
        precision = question.workload.precision
        if precision != "fp32":
            config[precision] = {"enabled": True}
        if question.workload.fp8 is not None:
            config["fp8"] = {"recipe": question.workload.fp8.value}
        if question.workload.quantization is not None:
            config["quantization"] = {"type": question.workload.quantization.value}
        if question.clipping > 0:
            config["gradient_clipping"] = question.clipping
        if case.setting.margin_use_ratio != Setting.margin_use_ratio:
            config["client"] = {"mem_tracer": {"margin_use_ratio": case.setting.margin_use_ratio}}
        return config


@dataclasses.dataclass(frozen=True)
class _Trace:
    """A model's traced step, and its chunk sizes by the requested ones."""

    model: PlannedModel
    params: SortedParams
    uses: StepUses
    ample_bytes: int
    scarce_numels: dict[int, int]
    exchanged: Exchanged | None
    num_unused: int
    """Elements of parameters that the step does not use."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Trial:
    """A layout, the case of an engine with all of the budgets, and a case that may have a shorter step."""

    size: int
    """Elements in a chunk."""
    predictor: Predictor
    usual: Case
    case: Case


class Planner:
    """Answers questions; caches traces, predictors and answers."""

    def __init__(self) -> None:
        self._traces: dict[tuple[Any, ...], _Trace] = {}
        self._predictors: dict[tuple[Any, ...], Predictor] = {}
        self._answers: dict[Question, Answer] = {}
        self._glances: dict[Question, Answer] = {}

    def answer(self, question: Question) -> Answer:
        """Returns the plan with the shortest step.

        Raises:
            DoesNotFitError: no chunk size fits.
            ValueError: the model does not exist, or the GPU does not support the dtype.
        """
        if question not in self._answers:
            self._answers[question] = self._answer(question, _THOROUGH)
        return self._answers[question]

    def try_answer(self, question: Question) -> Answer | DoesNotFitError:
        """Returns :meth:`answer` or its refusal."""
        try:
            return self.answer(question)
        except DoesNotFitError as refusal:
            return refusal

    def glance(self, question: Question, chunk_numel: int) -> Answer:
        """Returns an answer that tries one chunk size and all of the budgets: sooner, with a step that
        :meth:`answer` may shorten.

        Raises:
            As :meth:`answer`.
        """
        if question not in self._answers and question not in self._glances:
            one_size = dataclasses.replace(question, chunk_numel=question.chunk_numel or chunk_numel)
            self._glances[question] = dataclasses.replace(self._answer(one_size, _ROUGH), question=question)
        return self._answers.get(question) or self._glances[question]

    def _answer(self, question: Question, effort: _Effort) -> Answer:
        workload = question.workload
        trace = self._trace(question)
        trials, refusals = [], []
        for size in self._sizes(question, trace):
            predictor = self._predictor(question, trace, size)
            try:
                usual = predictor.predict(question.setting)
                trials.append(_Trial(size, predictor, usual, usual))
            except DoesNotFitError as refusal:
                refusals.append(refusal)
        if not trials:
            raise refusals[0]
        by_step = sorted(trials, key=lambda trial: trial.case.step.seconds)
        trials = [
            self._searched(question, trace, trial) if trial in by_step[: effort.num_searched] else trial
            for trial in trials
        ]
        cases = [trial.case for trial in trials]
        flops = trace.model.model_flops(workload.batch, workload.length) * question.setting.accumulation
        division = trace.model.division
        # The least waste among steps that are equally short within the simulator's tolerance.
        chosen = min(shortest_cases(cases), key=lambda case: case.waste_bytes)
        all_recomputed = None
        trial = next(trial for trial in trials if trial.case is chosen)
        predictor = trial.predictor
        may_save = question.setting.recompute is Recompute.AUTO and predictor.recomputations.top > 0
        if may_save and may_pay(chosen):
            all_recomputed = chosen.step
            bases = {case.setting: case for case in (chosen, trial.usual)}
            chosen = shortest_cases([*shortest_recomputation(predictor, bases.values(), effort.choose), chosen])[0]
        return Answer(
            question=question,
            num_params=trace.model.num_params,
            num_trained=trace.model.num_trained,
            num_active=trace.model.num_active,
            num_unused=trace.num_unused,
            num_image_tokens=trace.model.num_image_tokens,
            chosen=chosen,
            all_recomputed=all_recomputed,
            cases=cases,
            model_flops=flops / workload.sharing_ranks,
            num_positions=trace.model.num_positions,
            attention=None if division is None else division.choice,
            exchanged=trace.exchanged,
        )

    def _searched(self, question: Question, trace: _Trace, trial: _Trial) -> _Trial:
        """Returns the trial with the shortest step: with its layout, or with that of an engine with less host memory
        (:func:`choose_layout`).
        """
        found = [dataclasses.replace(trial, case=ShortestStep(trial.predictor).choose(trial.usual))]
        less = host_bytes_for_values_in_place(trial.predictor.layout, question.setting)
        if less is not None and not trial.usual.is_hidden:
            setting = dataclasses.replace(question.setting, host_bytes=less)
            other = self._predictor(dataclasses.replace(question, setting=setting), trace, trial.size)
            with contextlib.suppress(DoesNotFitError):
                usual = other.predict(setting)
                found.append(_Trial(trial.size, other, usual, ShortestStep(other).choose(usual)))
        shortest = shortest_cases([trial.case for trial in found])[0]
        return next(trial for trial in found if trial.case is shortest)

    def refusal(self, question: Question) -> DoesNotFitError | None:
        """Returns the refusal, or None if the model fits; faster than an answer.

        Raises:
            ValueError: as :meth:`answer`.
        """
        trace = self._trace(question)
        refusals = []
        for size in self._sizes(question, trace):
            try:
                self._predictor(question, trace, size).predict(question.setting)
                return None
            except DoesNotFitError as refusal:
                refusals.append(refusal)
        return min(refusals, key=lambda refusal: refusal.least_device_bytes or 0)

    def needed_device_bytes(self, question: Question) -> int:
        """Device bytes of activations and of the largest access's chunks, with the best chunk size. At most
        ``device_memory`` if the model fits.
        """
        trace = self._trace(question)
        sizes = self._sizes(question, trace)
        placers = [self._predictor(question, trace, size).placer for size in sizes]
        return min(placer.needed_device_bytes(question.setting) for placer in placers)

    def most_offloaded_bytes(self, question: Question) -> int:
        """Activations that an answer offloads at most."""
        trace = self._trace(question)
        sizes = self._sizes(question, trace)
        return max(self._predictor(question, trace, size).timelines.away_bytes(question.setting) for size in sizes)

    def most_tokens(self, question: Question) -> int | None:
        """Longest sequence of its model if positions are rows of a table; else None."""
        return build_model(question.workload.model, 1, 1, checkpointing=False).most_tokens

    def _trace(self, question: Question) -> _Trace:
        question.check()
        workload, gpu = question.workload, question.gpu
        asked = tuple(dict.fromkeys((*CHUNK_SIZES, *_asked_numel(question))))
        shared, matrices, experts = question.shared_sequences(), question.shared_matrices(), question.shared_experts()
        key = (workload, gpu, asked, shared, matrices, experts)
        if key not in self._traces:
            model = build_model(
                workload.model,
                workload.batch,
                workload.length,
                checkpointing=workload.checkpointing,
                lora_rank=workload.lora_rank,
                prepare=question.change,
                shared=shared,
                matrices=matrices,
                experts=experts,
                images=workload.images,
            )
            dtype = DTYPES[workload.precision]
            quantization = None if workload.quantization is None else QuantizationConfig(type=workload.quantization)
            params = plan_params(model.module, dtype, use_cpu_embedding=False, quantization=quantization)
            # Before the trace, which changes the module.
            sets = working_sets(params, model.module)
            scarce = {size: choose_chunk_size(params, sets, size, 0) for size in asked}
            try:
                uses = trace_uses(
                    model.module, params, dtype, model.inputs, gpu, divisions=model.divisions, stack=model.stack
                )
            except NotImplementedError as error:
                raise ValueError(
                    f"--model {workload.model}: {type(model.module).__name__} computes with shapes that follow from "
                    "values, such as a loop over the experts that are hit, which a plan has not; plan a model of about "
                    f"this size whose experts are one parameter, such as qwen3-30b-a3b ({str(error).splitlines()[0]})"
                ) from error
            unused = _unused(params, uses)
            of_images = {index for index, spec in enumerate(params.chunked) if spec.param in model.image_params}
            model = model.without(unused).with_image_work(uses.forward_flops(of_images))
            self._traces[key] = _Trace(
                model,
                params,
                uses,
                next(iter(scarce.values())).ample_bytes,
                {size: chosen.numel for size, chosen in scarce.items()},
                _exchanged(model),
                sum(param.numel() for param in unused),
            )
        return self._traces[key]

    def _sizes(self, question: Question, trace: _Trace) -> list[int]:
        """Returns the chunk sizes to try. An engine reduces the given size on a scarce device."""
        ample = question.setting.device_bytes >= trace.ample_bytes
        wanted = _asked_numel(question) or CHUNK_SIZES
        return sorted({asked if ample else trace.scarce_numels[asked] for asked in wanted})

    def _predictor(self, question: Question, trace: _Trace, size: int) -> Predictor:
        cluster = question.chunk_cluster
        setting, optimizer = question.setting, question.setting.optimizer_config()
        layout = choose_layout(
            lambda scheme: make_layout(trace.params, size, cluster.chunk_ranks, scheme=scheme),
            optimizer,
            updates_begin_early=setting.may_put_values_in_place,
            device_bytes=setting.state_device_bytes,
            host_bytes=setting.host_bytes,
        )
        in_place = _C.puts_values_in_place(layout)
        key = (question.workload, question.machine, cluster, size, state_scheme(optimizer), in_place)
        if key not in self._predictors:
            self._predictors[key] = Predictor(trace.uses, layout, question.machine, cluster)
        return self._predictors[key]


def _unused(params: SortedParams, uses: StepUses) -> list[nn.Parameter]:
    used = set().union(*(use.params for use in uses.uses))
    return [spec.param for index, spec in enumerate(params.chunked) if index not in used]


def _asked_numel(question: Question) -> tuple[int, ...]:
    return () if question.chunk_numel is None else (question.chunk_numel,)


def _exchanged(model: PlannedModel) -> Exchanged | None:
    division = model.matrices or model.experts
    if division is None:
        return None
    return Exchanged(division.total_received_bytes, division.link_seconds, division.exposed_seconds)


def _as_written(num_bytes: int) -> int | str:
    """Returns a size text if it is exact."""
    text = enough_size(num_bytes)
    return text if parse_size(text) == num_bytes else num_bytes

"""Log of an engine's run on rank 0: a start line, a line about the plan, and a line every few steps.

The monitor (patrickstar/monitor) writes the lines about steps. :class:`RunLog` reports the forwards, backwards and
steps of a plain training loop to it. An engine that feeds its monitor itself passes one that does nothing.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from patrickstar import _C
from patrickstar.config import OptimizerType
from patrickstar.engine.standstill import Standstill
from patrickstar.monitor import LossOf, MonitorOptions, RunFacts, StallSampler, StepMonitor
from patrickstar.monitor.peak import peak_tflops
from patrickstar.planning.predicted_step import Prediction
from patrickstar.session.kept_plan import Inputs
from patrickstar.session.quiet_log import NoRunLog
from patrickstar.session.session import Session
from patrickstar.sizes import show_count, show_seconds, show_size

logger = logging.getLogger("patrickstar")

_STEPS_UNTIL_MEASURED = 10
"""A GPU measures a step within so many steps or never; the simulated device measures none."""


class RunLog(NoRunLog):
    """See the module's docstring.

    Args:
        session: of the engine, complete, on rank 0.
        monitor: receives the steps.
    """

    def __init__(self, session: Session, monitor: StepMonitor):
        self._session = session
        self._monitor = monitor
        self._standstill = Standstill()
        self._num_steps = 0
        self._has_said_plan = False

    def note_forward(self, inputs: Inputs | None) -> None:
        """Counts the samples and tokens."""
        self._standstill.note_forward()
        if inputs is not None:
            self._monitor.add_batch(inputs)

    def note_backward(self, loss: torch.Tensor) -> None:
        """Adds the loss to the step's."""
        self._standstill.note_backward()
        self._monitor.add_loss(loss)

    def note_zero_grad(self) -> None:
        """Drops the losses of the running step."""
        self._monitor.drop_losses()

    def note_step_without_gradients(self) -> None:
        """Warns if they are many in a row."""
        self._standstill.note_step_without_gradients()

    def end_step(self, lr: float) -> None:
        """Logs the plan once, and lets the monitor log."""
        self._standstill.note_step(self._session.outcome.applied, self._session.scaler)
        self._num_steps += 1
        if not self._has_said_plan:
            self._say_plan()
        self._monitor.end_step(lr)

    def resume(self) -> None:
        """Continues the step count."""
        self._monitor.load_state_dict({"num_steps": self._session.num_steps, "num_samples": 0})

    def change_ranks(self) -> None:
        """Logs the start line for the new ranks, whose samples count from now on."""
        self._monitor.change_ranks(len(self._session.ranks.members))
        self._has_said_plan, self._num_steps = False, 0
        logger.info("%s", start_line(self._session))

    def _say_plan(self) -> None:
        """Logs the plan line once the bound of a step is predicted, or once no prediction will come."""
        session = self._session
        predicted = session.runtime.predicted_step()
        patience = _STEPS_UNTIL_MEASURED if session.device.type == "cuda" else 1
        if predicted is not None or self._num_steps >= patience:
            self._has_said_plan = True
            logger.info("%s", plan_line(session, None if predicted is None else Prediction(**predicted)))


def begin_run_log(session: Session, monitor: StepMonitor) -> None:
    """Logs the start line, and from now on the run. Called on every rank; the first rank logs."""
    if session.ranks.context.rank == 0:
        logger.info("%s", start_line(session))
        if session.matrices.reason:
            logger.info("%s: %s", session.matrices.shown, session.matrices.reason)
        session.run_log = RunLog(session, monitor)


def make_monitor(session: Session, options: MonitorOptions, loss_of: LossOf = LossOf.MICRO_BATCH) -> StepMonitor:
    """A monitor of the session's engine.

    Raises:
        ImportError: the package of a requested sink is missing.
        ValueError: an existing metrics file does not fit.
    """
    facts = RunFacts(
        num_parameters=session.num_parameters,
        num_trainable=_num_trainable(session),
        rank=session.ranks.context.rank,
        num_ranks=len(session.ranks.members),
        ranks_per_sample=session.calls.ranks_per_call,
        device=session.device,
        peak_tflops=_measured_peak(session) if options.shows_rates else None,
        loss_of=loss_of,
    )
    return StepMonitor(options, facts, session.report, make_stall_sampler(session))


def _measured_peak(session: Session) -> float | None:
    """See :func:`peak_tflops`; None on ranks that log nothing."""
    if session.ranks.context.rank != 0:
        return None
    return peak_tflops(session.device, session.config.compute_dtype, session.report()["device_budget_bytes"])


def make_stall_sampler(session: Session) -> StallSampler:
    """A sampler that traces some steps. Reads ``session.runtime`` late, since a resize replaces it."""
    return StallSampler(lambda: session.runtime.start_stall_trace(), lambda: session.runtime.take_stalls())


def start_line(session: Session) -> str:
    """The start line: model, device, budgets, the first tiers of optimizer states, and the optimizer."""
    report, num_trainable = session.report(), _num_trainable(session)
    num_ranks = len(session.ranks.members)
    some = 0 < num_trainable < session.num_parameters
    told = [f"{show_count(num_trainable)} train"] if some else [] if num_trainable else ["none trains"]
    trained = f" ({', '.join([*told, *_quantized(session)])})" if told else ""
    where = _device_name(session) + (f", {num_ranks} ranks" if num_ranks > 1 else "")
    if session.calls.sequence_group is not None:
        where += f", {session.calls.sequence_group.size} to a sequence ({session.config.sequence_parallel.mode.value})"
    if session.matrices.shown:
        where += f", {session.matrices.shown}"
    limit = report["device_budget_bytes"]
    budget = "no device budget" if limit >= _C.UNLIMITED else f"device budget {show_size(limit)}"
    each = " a rank" if num_ranks > 1 else ""
    chunks = _chunks(session, report["chunk_numel"])
    states = f", optimizer states {_states(session, report)}" if _num_state_chunks(session) else ""
    dtype = str(session.config.compute_dtype).removeprefix("torch.") + _in_8_bits(session)
    return (
        f"{show_count(session.num_parameters)} parameters{trained} in {dtype} on {where}; {budget}, host budget "
        f"{show_size(report['host_budget_bytes'])}{each}; {chunks}{states}; {_optimizer(session)}"
    )


def _in_8_bits(session: Session) -> str:
    """Layers that multiply in 8 bits, their share of FLOPs, and one layer that does not for each reason."""
    fp8, section = session.parts.fp8, session.config.fp8
    if fp8 is None or section is None:
        return ""
    by_reason = {reason: name for name, reason in reversed(fp8.left_out.items())}
    left_out = "".join(f", not {name} ({reason})" for reason, name in reversed(by_reason.items()))
    mixtures = f" and {fp8.num_experts} layers' experts" if fp8.num_experts else ""
    layers = f"{fp8.num_layers} linear layers{mixtures} with {fp8.share:.0%} of the products"
    return f" and FP8 ({section.recipe.value}: {layers}{left_out})"


def _optimizer(session: Session) -> str:
    """Type, learning rates before any schedule, and weight decays of the optimizer's groups."""
    config, groups = session.config.optimizer, session.optimizer.read_groups()
    rates = _range([group.get("initial_lr", group["lr"]) for group in groups])
    decays = _range([group["weight_decay"] for group in groups])
    is_unset = "weight_decay" not in config.params.model_fields_set and config.params.weight_decay == 0
    is_torchs = config.type is OptimizerType.ADAMW and is_unset and decays == "0"
    note = " (the default; torch.optim.AdamW's is 0.01)" if is_torchs else ""
    return f"{config.type.value}, lr {rates}, weight decay {decays}{note}"


def _range(values: list[Any]) -> str:
    least, most = min(map(float, values), default=0.0), max(map(float, values), default=0.0)
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def _chunks(session: Session, chunk_numel: int) -> str:
    """Number and size of chunks. A single parameter larger than the chunk size gets a chunk of its own size."""
    layout = session.layout
    count = layout.num_chunks
    largest = max((layout.chunk(index)["numel"] for index in range(count)), default=0)
    larger = f", or of one parameter, up to {show_count(largest)}" if largest > chunk_numel else ""
    return f"{count} chunk{'s' if count > 1 else ''} of up to {show_count(chunk_numel)} elements{larger}"


def plan_line(session: Session, predicted: Prediction | None) -> str:
    """The plan line. ``predicted``: of a measured step, or None."""
    report = session.report()
    bound = ""
    if predicted is not None:
        bound = f"; {predicted.bound.replace('_', ' ')} bounds a step, predicted {show_seconds(predicted.seconds)}"
    return (
        f"plan: optimizer states {_states(session, report)}{_codes(session, report)}; a step moves "
        f"{show_size(report['planned_uploaded_bytes'])} up and {show_size(report['planned_downloaded_bytes'])} down"
        f"{bound}"
    )


def _states(session: Session, report: dict[str, Any]) -> str:
    on_device, num_chunks = report["num_device_state_chunks"], _num_state_chunks(session)
    on_disk = report["num_disk_chunks"]
    if on_disk:
        disk = f"of {on_disk} on disk ({show_size(report['disk_bytes'])} in {session.config.disk_memory.path}, "
        return f"of {on_device} of {num_chunks} chunks on the device, {disk}{report['disk_io']})"
    if on_device == 0:
        return "all on the host"
    return "all on the device" if on_device == num_chunks else f"of {on_device} of {num_chunks} chunks on the device"


def _quantized(session: Session) -> list[str]:
    """Counts of quantised parameters by type."""
    chunked = session.plan_of_params.chunked
    types = dict.fromkeys(spec.quantization for spec in chunked if spec.quantization is not _C.QuantType.NONE)
    counts = {type: sum(spec.param.numel() for spec in chunked if spec.quantization is type) for type in types}
    return [f"{show_count(count)} are in {type.name.lower()}" for type, count in counts.items()]


def _codes(session: Session, report: dict[str, int]) -> str:
    chunks = [session.layout.chunk(index) for index in range(session.layout.num_chunks)]
    num_chunks = sum(chunk["quantization"] != _C.QuantType.NONE for chunk in chunks)
    on_device = report["num_device_quantized_chunks"]
    return f", {on_device} of {num_chunks} quantised chunks on the device" if num_chunks else ""


def _num_state_chunks(session: Session) -> int:
    return sum(session.layout.chunk(index)["trainable"] for index in range(session.layout.num_chunks))


def _num_trainable(session: Session) -> int:
    return session.matrices.num_elements(param for param in session.module.parameters() if param.requires_grad)


def _device_name(session: Session) -> str:
    if session.device.type == "cuda":
        return torch.cuda.get_device_name(session.device)
    return "a device simulated in host memory"

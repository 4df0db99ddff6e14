"""What the log says of an engine's run, on rank 0: a line as it begins, one about its plan, and one every few steps.

The lines about steps are the monitor's (patrickstar/monitor); here the calls of a plain loop (forward, backward, step)
become what it is told. An engine that tells a monitor itself gives one that does nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from patrickstar import _C
from patrickstar.monitor import LossOf, MonitorOptions, RunFacts, StallSampler, StepMonitor
from patrickstar.monitor.peak import peak_tflops
from patrickstar.planning.predicted_step import Prediction
from patrickstar.sizes import show_count, show_seconds, show_size

if TYPE_CHECKING:
    from patrickstar.engine.kept_plan import Inputs
    from patrickstar.engine.session import Session

logger = logging.getLogger("patrickstar")

_STEPS_UNTIL_MEASURED = 10
"""On a GPU a step is measured by then, if one is (`StepPlanner`); the simulated device measures none."""


class NoRunLog:
    """Nothing is logged."""

    def note_forward(self, inputs: Inputs | None) -> None:
        """After each training forward of the whole module; None: its inputs are not known."""

    def note_backward(self, loss: torch.Tensor) -> None:
        """After each backward."""

    def note_zero_grad(self) -> None:
        """After gradients were forgotten."""

    def end_step(self, lr: float) -> None:
        """After each optimizer step; ``lr`` is that of the first group."""

    def resume(self) -> None:
        """After a checkpoint was loaded whose steps are counted on."""

    def change_ranks(self) -> None:
        """After the session was reopened with another number of ranks."""


class RunLog(NoRunLog):
    """See the module's docstring; of rank 0.

    Args:
        session: the engine's, complete.
        monitor: what its steps are told to.
    """

    def __init__(self, session: Session, monitor: StepMonitor):
        self._session = session
        self._monitor = monitor
        self._num_steps = 0
        self._has_said_plan = False

    def note_forward(self, inputs: Inputs | None) -> None:
        """Its samples and tokens count."""
        if inputs is not None:
            self._monitor.add_batch(inputs)

    def note_backward(self, loss: torch.Tensor) -> None:
        """The loss is part of the step's."""
        self._monitor.add_loss(loss)

    def note_zero_grad(self) -> None:
        """Losses of the step count no more."""
        self._monitor.drop_losses()

    def end_step(self, lr: float) -> None:
        """Logs the plan once, and what the monitor has to say."""
        self._num_steps += 1
        if not self._has_said_plan:
            self._say_plan()
        self._monitor.end_step(lr)

    def resume(self) -> None:
        """Lines count on."""
        self._monitor.load_state_dict({"num_steps": self._session.num_steps, "num_samples": 0})

    def change_ranks(self) -> None:
        """Logs how the run goes on; lines count samples of the new ranks."""
        self._monitor.change_ranks(len(self._session.ranks.members))
        self._has_said_plan, self._num_steps = False, 0
        logger.info("%s", start_line(self._session))

    def _say_plan(self) -> None:
        """As soon as it is known what bounds the step, or when that will not be known."""
        session = self._session
        predicted = session.runtime.predicted_step()
        patience = _STEPS_UNTIL_MEASURED if session.device.type == "cuda" else 1
        if predicted is not None or self._num_steps >= patience:
            self._has_said_plan = True
            logger.info("%s", plan_line(session, None if predicted is None else Prediction(**predicted)))


def begin_run_log(session: Session, monitor: StepMonitor) -> None:
    """Logs that the engine is there, and from now on what it does. On every rank; the first one logs."""
    if session.ranks.context.rank == 0:
        logger.info("%s", start_line(session))
        if session.matrices.reason:
            logger.info("matrices are divided %s: %s", session.matrices.shown, session.matrices.reason)
        session.run_log = RunLog(session, monitor)


def make_monitor(session: Session, options: MonitorOptions, loss_of: LossOf = LossOf.MICRO_BATCH) -> StepMonitor:
    """A monitor of the session's engine.

    Raises:
        ImportError: a package for what is asked is missing.
        ValueError: a file of metrics that is there does not fit.
    """
    facts = RunFacts(
        num_parameters=session.num_parameters,
        num_trainable=_num_trainable(session),
        rank=session.ranks.context.rank,
        num_ranks=len(session.ranks.members),
        ranks_per_sample=session.calls.ranks_per_call,
        device=session.device,
        peak_tflops=peak_tflops(session.device, session.config.compute_dtype) if options.shows_rates else None,
        loss_of=loss_of,
    )
    return StepMonitor(options, facts, session.report, make_stall_sampler(session))


def make_stall_sampler(session: Session) -> StallSampler:
    """What traces a step of the session's engine now and then; a resize gives the session another runtime."""
    return StallSampler(lambda: session.runtime.start_stall_trace(), lambda: session.runtime.take_stalls())


def start_line(session: Session) -> str:
    """What is trained, on what, within which budgets, and where optimizer states lie at first."""
    report, num_trainable = session.report(), _num_trainable(session)
    num_ranks = len(session.ranks.members)
    some = 0 < num_trainable < session.num_parameters
    told = [f"{show_count(num_trainable)} train"] if some else [] if num_trainable else ["none trains"]
    trained = f" ({', '.join([*told, *_quantized(session)])})" if told else ""
    where = _device_name(session) + (f", {num_ranks} ranks" if num_ranks > 1 else "")
    if session.calls.sequence_group is not None:
        where += f", {session.calls.sequence_group.size} to a sequence ({session.config.sequence_parallel.mode.value})"
    if session.matrices.shown:
        where += f", matrices divided {session.matrices.shown}"
    limit = report["device_budget_bytes"]
    budget = "no device budget" if limit >= _C.UNLIMITED else f"device budget {show_size(limit)}"
    each = " a rank" if num_ranks > 1 else ""
    chunks = _chunks(session, report["chunk_numel"])
    states = f", optimizer states {_states(session, report)}" if _num_state_chunks(session) else ""
    dtype = str(session.config.compute_dtype).removeprefix("torch.")
    return (
        f"{show_count(session.num_parameters)} parameters{trained} in {dtype} on {where}; {budget}, host budget "
        f"{show_size(report['host_budget_bytes'])}{each}; {chunks}{states}"
    )


def _chunks(session: Session, chunk_numel: int) -> str:
    """How many there are, and their size, which a parameter that is larger by itself exceeds."""
    layout = session.layout
    count = layout.num_chunks
    largest = max((layout.chunk(index)["numel"] for index in range(count)), default=0)
    larger = f", or of one parameter, up to {show_count(largest)}" if largest > chunk_numel else ""
    return f"{count} chunk{'s' if count > 1 else ''} of up to {show_count(chunk_numel)} elements{larger}"


def plan_line(session: Session, predicted: Prediction | None) -> str:
    """What steps are like from now on; ``predicted``: where one was measured."""
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
    """How many of the parameters, which are frozen, are stored in fewer bits."""
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

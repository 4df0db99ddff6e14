"""What a step costs: placement and plan as an engine would choose them, then the simulator (csrc/plan/simulator.h)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from patrickstar import _C
from patrickstar.config import ActivationOffload, Master, OptimizerConfig, OptimizerType, Speculation, States
from patrickstar.machine.state_scheme import lacks_room_ahead, may_put_values_in_place
from patrickstar.planning.activation_rules import DeviceShares
from patrickstar.planning.cluster import Cluster, HostTraffic
from patrickstar.planning.leaving import Device, Tides
from patrickstar.planning.machines import Machine
from patrickstar.planning.predicted_step import Prediction, StepTimes
from patrickstar.planning.step_plan import Plan, PlannedChunk, plan_of, planned_chunks
from patrickstar.planning.timeline import Accesses, TimedTimeline, play_accesses
from patrickstar.planning.update_costs import UpdateRates, costs_of_chunks
from patrickstar.planning.uses import StepUses
from patrickstar.sizes import enough_size, show_shortage, show_size, size_in_words

# Of choosing a plan and learning what it takes of the host's memory.
_ROUNDS = 4
_ONE_GPU = Cluster()
# Numbers of chunks with states on the device that are tried: the same whatever the budgets are, so that more memory has
# all that less has. After so many that made the step no shorter no further ones are. And, of the other chunks, shares
# that are updated as a whole in backward, the rest parameters first.
_COUNTS = (*range(9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256)
_PATIENCE = 2
_SHARES_WHOLE = (0.0, 0.25, 0.5, 0.75)
_HALVINGS = 12
_EARLY = {"HOST_AT_RETIRE", "HOST_PARAM_FIRST", "DISK_AT_RETIRE"}  # of _C.UpdateAt: begin in backward
_EXACT = 128  # the least device memory with which activations leave is found to one part in so many


def predict(
    plan: Plan,
    compute_seconds: Sequence[float],
    rates: _C.Rates,
    *,
    num_speculated_chunks: int | None = None,
) -> Prediction:
    """The steady step that ``plan`` gives.

    Args:
        plan: of an engine (``engine.plan()``), of a file, or made here.
        compute_seconds: by moment of ``plan.timeline``: the device's work until the next moment, without waiting.
        rates: of the machine.
        num_speculated_chunks: how many chunks, from the first on, are updated during backward if their states are on
            the host (csrc/engine/speculation.h); None: all. The others' updates start when the norm is known.

    Raises:
        ValueError: sizes do not agree or a rate is not positive.
    """
    count = len(plan.chunks) if num_speculated_chunks is None else num_speculated_chunks
    ahead = [_C.Ahead.EVERYTHING if index < count else _C.Ahead.NOTHING for index in range(len(plan.chunks))]
    updates = [
        _C.update_at(chunk.trainable, _C.DType.__members__[chunk.dtype], chunk.tier, _C.UpdateStart.SPECULATIVE, part)
        for chunk, part in zip(plan.chunks, ahead, strict=True)
    ]
    return _simulated(plan, compute_seconds, rates, updates)


def _simulated(
    plan: Plan, compute_seconds: Sequence[float], rates: _C.Rates, updates: Sequence[_C.UpdateAt]
) -> Prediction:
    problem = plan.problem
    step = _C.simulate(
        plan.timeline,
        problem["costs"],
        plan.as_core(),
        rates,
        compute_seconds=list(compute_seconds),
        updates=list(updates),
        numels=[chunk.shard_numel for chunk in plan.chunks],
        num_ranks=plan.num_ranks,
        disk_bytes=[chunk.disk_bytes for chunk in plan.chunks],
        dequantized_bytes=_dequantized_bytes(plan.chunks, rates),
        **{key: value for key, value in problem.items() if key not in ("costs", "prefetch_bytes", "idle_bytes")},
    )
    return Prediction(**step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What an engine is given, on each rank."""

    device_bytes: int
    """Budget of device memory in bytes, the configuration's ``device_memory``."""
    host_bytes: int
    """Budget of host memory in bytes, the configuration's ``host_memory``."""
    disk_bytes: int = 0
    """What of a disk optimizer states may take, the configuration's ``disk_memory.size``; 0: there is none."""
    margin_use_ratio: float = 1.0
    """Share of the device memory left after compute copies and the tide that optimizer states may take
    (``client.mem_tracer.margin_use_ratio``).
    """
    hybrid_adam: bool = True
    """Whether optimizer states may live on the device (``optimizer.params.use_hybrid_adam``)."""
    speculation: Speculation = Speculation.AUTO
    """Whether updates on the host start during backward (``optimizer.speculation``)."""
    optimizer: OptimizerType = OptimizerType.ADAMW
    """Which rule updates (``optimizer.type``)."""
    states: States = States.FP32
    """What momentum and variance are stored in (``optimizer.states``)."""
    master: Master = Master.EXACT
    """What parameters are updated from (``optimizer.master``)."""
    accumulation: int = 1
    """Forwards and backwards of each step, whose gradients are added up."""
    offload: ActivationOffload = ActivationOffload.AUTO
    """Whose activations may leave the device between forward and backward (``activations.offload``)."""

    def optimizer_config(self) -> OptimizerConfig:
        """What the configuration's section ``optimizer`` says of it."""
        return OptimizerConfig(
            type=self.optimizer, speculation=self.speculation, states=self.states, master=self.master
        )

    @property
    def backwards(self) -> _C.Backwards:
        """What the engine knows of them (``gradient_accumulation_steps``)."""
        return _C.Backwards.SEVERAL if self.accumulation > 1 else _C.Backwards.ONE

    @property
    def update_start(self) -> _C.UpdateStart:
        """When updates on the host may start: after the norm where gradients add up, or parameters have no master, but
        for committed ones.
        """
        if self.accumulation > 1 or self.speculation is Speculation.NEVER:
            return _C.UpdateStart.AFTER_NORM
        if self.speculation is Speculation.COMMIT:
            return _C.UpdateStart.COMMITTED
        return _C.UpdateStart.AFTER_NORM if self.master is Master.STOCHASTIC else _C.UpdateStart.SPECULATIVE

    @property
    def updates_take_memory(self) -> bool:
        """Whether updates on the host start during backward beside the old values."""
        return self.update_start == _C.UpdateStart.SPECULATIVE


class DoesNotFitError(_C.MemoryBudgetError):
    """A model does not fit the budgets; the message says by how much."""

    def __init__(self, message: str, *, least_device_bytes: int | None = None, least_host_bytes: int | None = None):
        super().__init__(message)
        self.least_device_bytes = least_device_bytes
        """The ``device_memory`` that would do, where that is what is short."""
        self.least_host_bytes = least_host_bytes
        """The ``host_memory`` that would do, where that is what is short."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What becomes of one chunk size."""

    chunk_numel: int
    """Elements in a chunk of this size."""
    setting: Setting
    """What it was planned with: :meth:`Predictor.choose` may take less than it was given."""
    plan: Plan
    """What an engine with such chunks would move when."""
    num_device_state_chunks: int
    """Chunks with optimizer states on the device."""
    num_device_quantized_chunks: int
    """Chunks with codes and scales on the device."""
    num_speculated_chunks: int
    """Chunks whose updates start during backward."""
    num_parameters_first: int
    """Of these, chunks whose states are updated behind the step, since memory suffices for their parameters alone."""
    num_disk_chunks: int
    """Chunks with optimizer states on the disk."""
    disk_bytes: int
    """What these take there, of one rank."""
    host_bytes: int
    """Parameters and optimizer states on the host, of one rank, and what those on the disk pass through."""
    host_peak_bytes: int
    """The most that one rank's engine maps of the host: also new values of updates ahead of the step, gradients on
    their way, and places of states that move to the device after the first step.
    """
    least_host_bytes: int
    """The least ``host_memory`` that works with all states on the host, or those on the disk that it takes."""
    stashed_bytes: int
    """Activations that are on the host between forward and backward, beside :attr:`host_bytes`."""
    kept_attention: int
    """Calls of attention in checkpointed layers whose results are kept for backward."""
    waste_bytes: int
    """The most that the chunks which a moment needs hold beside the parameters that it needs."""
    step: Prediction
    """While clipping does not act."""
    play_clipped: Callable[[], Prediction] = dataclasses.field(repr=False, compare=False)
    """Makes :attr:`clipped_step`."""
    find_least_device: Callable[[], int] = dataclasses.field(repr=False, compare=False)
    """Makes :attr:`least_device_bytes`."""

    @functools.cached_property
    def least_device_bytes(self) -> int:
        """The least ``device_memory`` that works with all states on the host."""
        return self.find_least_device()

    @functools.cached_property
    def clipped_step(self) -> Prediction:
        """While clipping acts in every step: what begins in backward are values, the rest when the norm is known."""
        return self.play_clipped()


def predict_case(
    uses: StepUses, layout: _C.Layout, machine: Machine, setting: Setting, cluster: Cluster = _ONE_GPU
) -> Case:
    """What an engine on CUDA does with this layout: see csrc/engine/residency.cpp. ``layout`` is for the ranks of
    ``cluster``; budgets, steps and bytes are one rank's.

    Raises:
        DoesNotFitError: it does not fit; the message says by how much.
        ValueError: the layout is for another number of ranks.
    """
    return Predictor(uses, layout, machine, cluster).predict(setting)


class Predictor:
    """Predicts what an engine on CUDA does with one layout, with any budgets. It keeps what does not depend on them."""

    def __init__(self, uses: StepUses, layout: _C.Layout, machine: Machine, cluster: Cluster = _ONE_GPU):
        if layout.num_ranks != cluster.chunk_ranks:
            raise ValueError(
                f"the layout is for {layout.num_ranks} ranks, of the cluster {cluster.chunk_ranks} GPUs share each "
                "chunk; give one rank for each of these"
            )
        self._uses, self._layout, self._machine, self._cluster = uses, layout, machine, cluster
        self._chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
        self._in_place = _C.puts_values_in_place(layout)
        self._timelines: dict[tuple[Device | None, Device | None, tuple[bool, ...]], TimedTimeline] = {}
        self._accesses: dict[tuple[bool, ...], Accesses] = {}
        self._leaving: dict[Device, Tides] = {}
        self._largest_module_bytes = _C.working_set_bytes(layout, uses.module_params)
        self._least: dict[tuple[Setting, int], int] = {}

    def needed_device_bytes(self, setting: Setting) -> int:
        """What activations and the largest moment's chunks need of the device, all states on the host, when as many
        activations leave as with this ``device_memory``: more than that where it does not fit.
        """
        moments = self._timeline(self._first_device(setting), self._nowhere).moments
        problem = _C.pose_problem(self._layout, moments, self._nowhere, self._budget(setting))
        return int(_C.make_plan(moments, **problem)["least_limit_bytes"] / (1 - _C.CUDA_SLACK_RATIO)) + 1

    def least_device_bytes(self, setting: Setting) -> int:
        """The ``device_memory`` that activations and the largest moment's chunks need, all states on the host; where
        activations leave within 1 %, and not too little.
        """
        staying = dataclasses.replace(setting, offload=ActivationOffload.NEVER)
        high = self.needed_device_bytes(staying)
        if not self._may_leave(setting):
            return high
        room = self._first_room(setting)
        key = (dataclasses.replace(setting, device_bytes=0), room)
        if key not in self._least:
            low = 0
            while high - low > high // _EXACT:
                middle = (low + high) // 2
                needed = self.needed_device_bytes(dataclasses.replace(setting, device_bytes=middle))
                low, high = (max(low, middle), high) if needed > middle else (low, middle)
            self._least[key] = high
        return self._least[key]

    def predict(self, setting: Setting) -> Case:
        """With these budgets. Raises DoesNotFitError."""
        layout, chunks = self._layout, self._chunks
        least_host = self._least_host_bytes(setting)
        budget = self._budget(setting)
        if self.needed_device_bytes(setting) > setting.device_bytes:
            least = max(self.least_device_bytes(setting), setting.device_bytes + 1)
            raise DoesNotFitError(
                f"device_memory: {show_shortage(least, setting.device_bytes)}, for activations and the largest "
                f"moment's chunks; give at least {enough_size(least)}",
                least_device_bytes=least,
            )
        first, on_device = self._place(setting, budget)
        homes = _C.later_homes(layout, first, on_device, setting.host_bytes, setting.backwards)
        on_disk = [home == _C.Tier.DISK for home in homes]
        host_bytes = _C.bytes_on_host(layout, homes, setting.backwards) + _C.disk_set_bytes(layout, first)
        budget.gradient_room_bytes = _C.gradient_room_bytes(layout, homes, setting.host_bytes)
        room = setting.host_bytes - host_bytes - _C.reserved_gradient_bytes(layout)
        later = self._later_device(setting, room)
        timed = self._timeline(self._first_device(setting), on_device, later)
        timed = _slowed(timed, self._cluster.slowdown(self._machine))
        stashed_bytes = 0 if later is None else self._tides(later).away_bytes
        room -= stashed_bytes + _C.leaving_gradient_bytes(layout, timed.moments, on_device, budget)
        planned = planned_chunks(layout, on_device, on_disk)
        ahead = _C.choose_ahead(layout, homes, room)
        rates = self._update_rates(setting.optimizer, on_device)

        def play(scale: _C.ExpectedScale) -> Plan:
            updates = [
                _C.update_at(chunk["trainable"], chunk["dtype"], home, setting.update_start, part, scale)
                for chunk, home, part in zip(chunks, homes, ahead, strict=True)
            ]
            choose = functools.partial(
                _choose_plan, layout, timed, on_device, on_disk, budget, updates, setting.update_start
            )
            return _shared_host_plan(choose, self._machine, self._cluster, planned, rates)

        def step_of(plan: Plan) -> Prediction:
            return _accumulated(plan, setting.accumulation)

        plan = play(_C.ExpectedScale.EXACT)
        assert plan.times is not None
        if plan.least_limit_bytes > budget.limit_bytes:
            raise DoesNotFitError(
                f"host_memory is {show_size(setting.host_bytes)}, which leaves so many optimizer states to the GPU "
                f"that a step needs {show_size(plan.least_limit_bytes)} there; raise host_memory to "
                f"{enough_size(least_host)}, or device_memory",
                least_host_bytes=least_host,
            )
        return Case(
            chunk_numel=layout.chunk_numel,
            setting=setting,
            plan=plan,
            num_device_state_chunks=sum(chunk.trainable and chunk.states_on_device for chunk in planned),
            num_device_quantized_chunks=sum(c.quantization != "NONE" and c.states_on_device for c in planned),
            num_speculated_chunks=sum(name in _EARLY for name in plan.times.updates),
            num_parameters_first=plan.times.updates.count(_C.UpdateAt.HOST_PARAM_FIRST.name),
            num_disk_chunks=sum(on_disk),
            disk_bytes=sum(chunk.disk_bytes for chunk in planned),
            host_bytes=host_bytes,
            host_peak_bytes=_with_guests(
                _C.host_peak_bytes(
                    layout,
                    first,
                    on_device,
                    setting.host_bytes,
                    updates_ahead=setting.updates_take_memory,
                    backwards=setting.backwards,
                ),
                stashed_bytes,
                setting.host_bytes,
            ),
            stashed_bytes=stashed_bytes,
            kept_attention=0 if later is None else self._tides(later).kept_calls,
            least_host_bytes=least_host,
            waste_bytes=timed.waste_bytes,
            step=step_of(plan),
            play_clipped=lambda: step_of(play(_C.ExpectedScale.BETWEEN)),
            find_least_device=lambda: self.least_device_bytes(setting),
        )

    def choose(self, setting: Setting) -> Case:
        """The shortest step with at most these budgets, so that more memory makes no step longer.

        How many chunks have their states on the device follows from memory alone (csrc/plan/placement.h,
        num_margin_chunks), and more or fewer of them may take less time: an engine with ample ``host_memory`` leaves
        states on the host that the next forward waits for; one with an ample device updates there, between two steps,
        what the host would update beside it. And with ample ``host_memory`` the next forward waits for whole updates,
        where with less it waits for parameters alone. So less ``host_memory`` and a lower ``margin_use_ratio`` are
        tried too.

        Raises:
            DoesNotFitError: it does not fit.
        """
        cases = [self.predict(setting)]
        step = cases[0].step
        is_hidden = step.seconds <= (1 + _C.PREDICTION_TOLERANCE) * step.compute_seconds
        if setting.hybrid_adam and not is_hidden:
            usual, most = self._state_counts(setting)
            fewer = (self._with_fewer(setting, count) for count in reversed(_COUNTS) if count < usual)
            more = (self._with_less_host(setting, count, 0) for count in (*_COUNTS, most) if usual < count <= most)
            num_others = len(self._chunks) - usual
            whole = [self._with_less_host(setting, usual, int(share * num_others)) for share in _SHARES_WHOLE]
            cases += self._descend(fewer, cases[0], _PATIENCE)
            cases += self._descend(filter(self._is_for, more), cases[0], _PATIENCE)
            cases += self._descend(filter(self._is_for, whole), cases[0], len(whole))
        shortest = min(case.step.seconds for case in cases)
        return next(case for case in cases if case.step.seconds <= shortest * (1 + _C.PREDICTION_TOLERANCE))

    def _is_for(self, setting: Setting | None) -> bool:
        """Whether an engine that is given less host memory, as here, stores states as this layout does."""
        if setting is None or self._in_place or not may_put_values_in_place(self._layout, setting.optimizer_config()):
            return setting is not None
        device_bytes, host_bytes = setting.device_bytes, setting.host_bytes
        return not lacks_room_ahead(self._layout, device_bytes=device_bytes, host_bytes=host_bytes)

    def _descend(self, settings: Iterable[Setting | None], begin: Case, patience: int) -> list[Case]:
        """Cases of settings in their order, None passed over, until so many in a row made the step no shorter."""
        cases, shortest, worse = [], begin.step.seconds, 0
        for setting in settings:
            if setting is None:
                continue
            with contextlib.suppress(DoesNotFitError):
                cases.append(self.predict(setting))
                worse = worse + 1 if cases[-1].step.seconds >= shortest else 0
                shortest = min(shortest, cases[-1].step.seconds)
            if worse == patience:
                break
        return cases

    def _state_counts(self, setting: Setting) -> tuple[int, int]:
        """How many chunks, from the first on, an engine has on the device with their states: with these budgets, and
        with so little host memory that no update could begin in backward otherwise.
        """
        budget = self._budget(setting)
        usual = self._num_states(setting, budget)
        if not setting.updates_take_memory:
            return usual, usual
        budget.host_limit_bytes = 0
        return usual, self._num_states(setting, budget)

    def _num_states(self, setting: Setting, budget: _C.DeviceBudget) -> int:
        moments = self._timeline(self._first_device(setting), self._nowhere).moments
        return _C.num_device_state_chunks(self._layout, moments, budget)

    def _with_fewer(self, setting: Setting, count: int) -> Setting | None:
        """The largest ``margin_use_ratio`` that leaves so many chunks' states to the device, or None."""
        budget = self._budget(setting)
        budget.host_limit_bytes = 2**62
        low, high = 0.0, setting.margin_use_ratio
        for _ in range(_HALVINGS):
            budget.margin_use_ratio = (low + high) / 2
            low, high = (
                (low, budget.margin_use_ratio)
                if self._num_states(setting, budget) > count
                else ((low + high) / 2, high)
            )
        for ratio in (math.floor(low * 1000) / 1000, low):  # one to read where it does as well
            budget.margin_use_ratio = ratio
            if ratio > 0.0 and self._num_states(setting, budget) == count:
                return dataclasses.replace(setting, margin_use_ratio=ratio)
        return None

    def _with_less_host(self, setting: Setting, count: int, num_whole: int) -> Setting | None:
        """The ``host_memory`` that makes an engine have so many chunks' states on the device, and of the others update
        so many as a whole in backward and the rest parameters first; None where that is not less.
        """
        if not setting.updates_take_memory:
            return None
        on_host = [chunk for chunk in self._chunks[count:] if chunk["trainable"]]
        later = self._later_device(setting, setting.host_bytes)
        guests = 0 if later is None else self._tides(later).away_bytes
        states = sum(chunk["home_bytes"] - chunk["param_bytes"] for chunk in on_host[:num_whole])
        num_bytes = size_in_words(self._bytes_ahead(count) + guests + states)
        return dataclasses.replace(setting, host_bytes=num_bytes) if num_bytes < setting.host_bytes else None

    def _bytes_ahead(self, first: int) -> int:
        """What the chunks from ``first`` on take on the host with new compute values beside the old ones."""
        rest = self._chunks[first:]
        new_values = sum(chunk["new_value_bytes"] for chunk in rest if chunk["trainable"])
        return _C.reserved_gradient_bytes(self._layout) + sum(chunk["home_bytes"] for chunk in rest) + new_values

    def _update_rates(self, rule: OptimizerType, on_device: Sequence[bool]) -> UpdateRates:
        sides = [[c for c, at in zip(self._chunks, on_device, strict=True) if at == side] for side in (False, True)]
        return self._machine.update_rates(*(costs_of_chunks(chunks, rule) for chunks in sides))

    @property
    def _nowhere(self) -> list[bool]:
        return [False] * len(self._chunks)

    def _timeline(self, first: Device | None, on_device: Sequence[bool], later: Device | None = None) -> TimedTimeline:
        """``first``: that activations leave in the first step, whose tide it is; None: they stay. ``later``: that
        attention is kept in later ones, which saves time.
        """
        places = tuple(on_device)
        key = (first, later, places)
        if key not in self._timelines:
            if places not in self._accesses:
                self._accesses[places] = play_accesses(self._uses, self._layout, on_device)
            uses = self._uses
            if first is not None or later is not None:
                uses = uses.with_tides(*(None if device is None else self._tides(device) for device in (first, later)))
            self._timelines[key] = self._accesses[places].timed(uses)
        return self._timelines[key]

    def _tides(self, device: Device) -> Tides:
        """When activations leave the device."""
        if device not in self._leaving:
            self._leaving[device] = self._uses.leaving(device)
        return self._leaving[device]

    def _may_leave(self, setting: Setting) -> bool:
        """Whether any activations may."""
        return setting.offload is ActivationOffload.ALWAYS or (
            setting.offload is ActivationOffload.AUTO and self._uses.checkpoints
        )

    def _first_device(self, setting: Setting) -> Device | None:
        """That activations leave in the first step, whose tide the plan is made for; None where all stay."""
        if not self._may_leave(setting):
            return None
        device = self._device_at_first(setting)
        return device if self._tides(device).away_bytes else None

    def _first_room(self, setting: Setting) -> int:
        """Of the host, beside the homes that chunks have in the first step."""
        _, host_bytes, _ = self._initial_placement(setting)
        return max(setting.host_bytes - host_bytes, 0)

    def _later_device(self, setting: Setting, room: int) -> Device | None:
        """In later steps, when the first one has shown what activations need, and states that went to the device have
        left ``room`` on the host.
        """
        if not self._may_leave(setting):
            return None
        first = self._device_at_first(setting)
        return dataclasses.replace(first, room_bytes=max(room, 0), seen=self._tides(first).seen)

    def _device_at_first(self, setting: Setting) -> Device:
        return Device(
            shares=DeviceShares(setting.device_bytes, self._largest_module_bytes), room_bytes=self._first_room(setting)
        )

    def _initial_placement(self, setting: Setting) -> tuple[list[_C.Tier], int, int]:
        room = max(self._budget(setting).limit_bytes - self._largest_module_bytes, 0)
        return _C.initial_placement(self._layout, setting.host_bytes, room, setting.backwards, setting.disk_bytes)

    def _least_host_bytes(self, setting: Setting) -> int:
        limit = 0 if setting.disk_bytes else _C.UNLIMITED
        return _C.initial_placement(self._layout, limit, 0, setting.backwards, setting.disk_bytes)[1]

    def _budget(self, setting: Setting) -> _C.DeviceBudget:
        budget = _C.DeviceBudget()
        budget.limit_bytes = int(setting.device_bytes * (1 - _C.CUDA_SLACK_RATIO))
        budget.margin_use_ratio = setting.margin_use_ratio
        budget.keeps_gradients = setting.speculation is not Speculation.COMMIT
        budget.backwards = setting.backwards
        if setting.updates_take_memory:
            budget.host_limit_bytes = setting.host_bytes
        return budget

    def _least_host_from(self, setting: Setting, num_bytes: int) -> int:
        """``num_bytes``, with which placement works; more where activations need what the GPU has of states then."""
        try:
            self.predict(dataclasses.replace(setting, host_bytes=num_bytes))
        except DoesNotFitError as refusal:
            return max(num_bytes, refusal.least_host_bytes or 0)
        return num_bytes

    def _place(self, setting: Setting, budget: _C.DeviceBudget) -> tuple[list[_C.Tier], list[bool]]:
        """By chunk, where its states are at first, and whether they are on the device then: what host and disk cannot
        hold, and what the margin has room for.
        """
        first, host_bytes, _ = self._initial_placement(setting)
        if host_bytes > setting.host_bytes:
            once = "parameters and optimizer states"
            what = once if setting.accumulation == 1 else "parameters, optimizer states and gradients that accumulate"
            least = self._least_host_from(setting, host_bytes)
            on_host = [_C.Tier.HOST] * len(first)
            raise DoesNotFitError(
                f"host_memory: {show_shortage(least, setting.host_bytes)}; {what} take "
                f"{show_size(_C.bytes_on_host(self._layout, on_host, setting.backwards))}; raise host_memory to "
                f"{enough_size(least)}, or device_memory",
                least_host_bytes=least,
            )
        count = self._num_states(setting, budget) if setting.hybrid_adam else 0
        on_device = [home == _C.Tier.DEVICE for home in first]
        moved_in = set(_C.chunks_that_move_in(self._layout, count, on_device))
        return first, [at or index in moved_in for index, at in enumerate(on_device)]


def _slowed(timed: TimedTimeline, slowdown: float) -> TimedTimeline:
    return dataclasses.replace(timed, seconds=[seconds * slowdown for seconds in timed.seconds])


def _shared_host_plan(
    choose: Callable[[_C.Rates], Plan],
    machine: Machine,
    cluster: Cluster,
    chunks: Sequence[PlannedChunk],
    updates: UpdateRates,
) -> Plan:
    """What ``choose`` makes of the rates that are left when all GPUs of a node do the same: how fast transfers and
    updates are depends on how much of the host's memory bandwidth they take, and that on the step. A few rounds settle
    it.
    """
    updated = sum(c.shard_numel for c in chunks if c.trainable and not c.states_on_device)
    traffic = HostTraffic()
    for _ in range(1 if cluster.gpus_per_node == 1 else _ROUNDS):
        plan = choose(cluster.rates(machine, traffic, updates))
        step = plan.prediction
        assert step is not None
        per_second = 1e-9 / step.seconds
        traffic = HostTraffic(
            upload_gbps=step.uploaded_bytes * per_second,
            download_gbps=step.downloaded_bytes * per_second,
            adam_gbps=updated * updates.host_bytes * per_second,
        )
    if cluster.gpus_per_node == 1:
        return plan
    moved = step.uploaded_bytes + step.downloaded_bytes + updated * updates.host_bytes
    busy = moved / (cluster.host_gbps(machine) * 1e9)
    return dataclasses.replace(plan, prediction=dataclasses.replace(step, host_memory_seconds=busy))


def _choose_plan(
    layout: _C.Layout,
    timed: TimedTimeline,
    on_device: Sequence[bool],
    on_disk: Sequence[bool],
    budget: _C.DeviceBudget,
    updates: Sequence[_C.UpdateAt],
    start: _C.UpdateStart,
    rates: _C.Rates,
) -> Plan:
    """The plan that an engine chooses once it has measured these times (csrc/plan/plan_choice.h)."""
    activations = [copies.as_core() for copies in timed.copies]
    choice = _C.choose_step(
        layout,
        timed.moments,
        on_device,
        budget,
        rates,
        compute_seconds=timed.seconds,
        updates=updates,
        start=start,
        activations=activations,
        dequantized_bytes=_dequantized_bytes(planned_chunks(layout, on_device), rates),
    )
    times = {
        "rates": rates,
        "compute_seconds": timed.seconds,
        "updates": choice["updates"],
        "activations": activations,
    }
    return plan_of(
        layout,
        timed.moments,
        on_device,
        choice["problem"],
        choice["plan"],
        StepTimes.of_core(times),
        Prediction(**choice["predicted"]),
        on_disk,
    )


def _accumulated(plan: Plan, accumulation: int) -> Prediction:
    """The step of ``plan`` after so many backwards less one that only add to the gradients: their transfers and
    operations are as the last one's, and nothing is updated. What adding up takes of the host's time is not counted.
    """
    last, times = plan.prediction, plan.times
    assert last is not None and times is not None
    if accumulation == 1:
        return last
    core = times.as_core()
    core["rates"].synchronize_seconds = 0.0
    never = [_C.UpdateAt.NEVER] * len(plan.chunks)
    other = _simulated(plan, core["compute_seconds"], core["rates"], never)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Prediction):
        one, more = getattr(last, field.name), getattr(other, field.name)
        if field.name == "stall_seconds":
            values[field.name] = {cause: seconds + (accumulation - 1) * more[cause] for cause, seconds in one.items()}
        elif field.name == "peak_bytes":
            values[field.name] = max(one, more)
        else:
            values[field.name] = one + (accumulation - 1) * more
    return Prediction(**values)


def _with_guests(peak_bytes: int, stashed_bytes: int, limit_bytes: int) -> int:
    """The host's peak with activations, which updates ahead of the step make room for."""
    return min(peak_bytes + stashed_bytes, max(peak_bytes, limit_bytes))


def _dequantized_bytes(chunks: Sequence[PlannedChunk], rates: _C.Rates) -> list[int]:
    """By chunk; none where moments' times hold what it takes, as those that an engine has measured do."""
    return [chunk.dequantized_bytes for chunk in chunks] if rates.device_memory_gbps > 0 else []

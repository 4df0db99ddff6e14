"""What a step costs: placement and plan as an engine would choose them, then the simulator (csrc/plan/simulator.h)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from patrickstar import _C
from patrickstar.config import ActivationOffload, OptimizerType, Speculation
from patrickstar.planning.activation_rules import DeviceShares
from patrickstar.planning.cluster import Cluster
from patrickstar.planning.leaving import Device, Tides
from patrickstar.planning.machines import Machine
from patrickstar.planning.predicted_step import Prediction
from patrickstar.planning.setting import DoesNotFitError, Setting
from patrickstar.planning.simulation import accumulated, choose_plan, shared_host_plan
from patrickstar.planning.step_plan import Plan, planned_chunks
from patrickstar.planning.timeline import Accesses, TimedTimeline, play_accesses
from patrickstar.planning.update_costs import UpdateRates, costs_of_chunks
from patrickstar.planning.uses import StepUses
from patrickstar.sizes import enough_size, show_shortage, show_size

_ONE_GPU = Cluster()
_EXACT = 128  # the least device memory with which activations leave is found to one part in so many


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Plan and placement for one chunk size."""

    chunk_numel: int
    """Elements in a chunk of this size."""
    setting: Setting
    """Budgets of the plan; the shortest step may take less than was given (planning/shortest_step.py)."""
    plan: Plan
    """Transfers of an engine with such chunks."""
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
        self._uses, self.layout, self._machine, self._cluster = uses, layout, machine, cluster
        self.chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
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
        problem = _C.pose_problem(self.layout, moments, self._nowhere, self.device_budget(setting))
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
        layout, chunks = self.layout, self.chunks
        least_host = self._least_host_bytes(setting)
        budget = self.device_budget(setting)
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
        ahead = _C.choose_ahead(layout, homes, room if setting.updates_take_memory else 0)
        rates = self._update_rates(setting.optimizer, on_device)

        def play(scale: _C.ExpectedScale) -> Plan:
            updates = [
                _C.earliest_recipe(chunk["trainable"], chunk["dtype"], home, setting.update_start, part, scale)
                for chunk, home, part in zip(chunks, homes, ahead, strict=True)
            ]
            choose = functools.partial(
                choose_plan, layout, timed, on_device, on_disk, budget, updates, setting.update_start
            )
            return shared_host_plan(choose, self._machine, self._cluster, planned, rates)

        def step_of(plan: Plan) -> Prediction:
            return accumulated(plan, setting.accumulation)

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
            num_device_state_chunks=sum(c.trainable and c.states_on_device for c in planned),
            num_device_quantized_chunks=sum(
                chunk.quantization != "NONE" and chunk.states_on_device for chunk in planned
            ),
            num_speculated_chunks=sum(_starts_in_backward(name) for name in plan.times.updates),
            num_parameters_first=plan.times.updates.count(_C.Recipe.HOST_TWO_PASSES_AHEAD.name),
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

    def num_state_chunks(self, setting: Setting, budget: _C.DeviceBudget) -> int:
        """How many chunks, from the first on, an engine with this budget has on the device with their states."""
        moments = self._timeline(self._first_device(setting), self._nowhere).moments
        return _C.num_device_state_chunks(self.layout, moments, budget)

    def away_bytes(self, setting: Setting) -> int:
        """The most bytes of activations on the host at once, where all of ``host_memory`` is for them."""
        later = self._later_device(setting, setting.host_bytes)
        return 0 if later is None else self._tides(later).away_bytes

    def _update_rates(self, rule: OptimizerType, on_device: Sequence[bool]) -> UpdateRates:
        sides = [[c for c, at in zip(self.chunks, on_device, strict=True) if at == side] for side in (False, True)]
        return self._machine.update_rates(*(costs_of_chunks(chunks, rule) for chunks in sides))

    @property
    def _nowhere(self) -> list[bool]:
        return [False] * len(self.chunks)

    def _timeline(self, first: Device | None, on_device: Sequence[bool], later: Device | None = None) -> TimedTimeline:
        """``first``: that activations leave in the first step, whose tide it is; None: they stay. ``later``: that
        attention is kept in later ones, which saves time.
        """
        places = tuple(on_device)
        key = (first, later, places)
        if key not in self._timelines:
            if places not in self._accesses:
                self._accesses[places] = play_accesses(self._uses, self.layout, on_device)
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
        room = max(self.device_budget(setting).limit_bytes - self._largest_module_bytes, 0)
        return _C.initial_placement(self.layout, setting.host_bytes, room, setting.backwards, setting.disk_bytes)

    def _least_host_bytes(self, setting: Setting) -> int:
        limit = 0 if setting.disk_bytes else _C.UNLIMITED
        return _C.initial_placement(self.layout, limit, 0, setting.backwards, setting.disk_bytes)[1]

    def device_budget(self, setting: Setting) -> _C.DeviceBudget:
        """Budget of the device for placement and planner, made as in csrc/engine/residency.cpp."""
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
                f"{show_size(_C.bytes_on_host(self.layout, on_host, setting.backwards))}; raise host_memory to "
                f"{enough_size(least)}, or device_memory",
                least_host_bytes=least,
            )
        count = self.num_state_chunks(setting, budget) if setting.hybrid_adam else 0
        on_device = [home == _C.Tier.DEVICE for home in first]
        moved_in = set(_C.chunks_that_move_in(self.layout, count, on_device))
        return first, [at or index in moved_in for index, at in enumerate(on_device)]


def _starts_in_backward(recipe: str) -> bool:
    member: _C.Recipe = _C.Recipe.__members__[recipe]
    return member.starts_in_backward and member.states != _C.Tier.DEVICE


def _slowed(timed: TimedTimeline, slowdown: float) -> TimedTimeline:
    return dataclasses.replace(timed, seconds=[seconds * slowdown for seconds in timed.seconds])


def _with_guests(peak_bytes: int, stashed_bytes: int, limit_bytes: int) -> int:
    """The host's peak with activations, which updates ahead of the step make room for."""
    return min(peak_bytes + stashed_bytes, max(peak_bytes, limit_bytes))

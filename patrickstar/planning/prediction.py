"""Predicts a step: placement and plan as an engine chooses them, then the simulator (csrc/plan/simulator.h)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from patrickstar import _C
from patrickstar.activations.activation_rules import DeviceShares, Saved
from patrickstar.config import ActivationOffload, OptimizerType, Speculation
from patrickstar.planning.case import Case
from patrickstar.planning.cluster import Cluster
from patrickstar.planning.ladder import Ladder, saved_calls
from patrickstar.planning.leaving import LinkedDevice
from patrickstar.planning.machines import Machine
from patrickstar.planning.placed_states import earliest_updates, states_on_device
from patrickstar.planning.predicted_step import Prediction
from patrickstar.planning.saved_steps import most_sent, sent_bytes, slowdown_of_updates, step_with_saved
from patrickstar.planning.setting import DoesNotFitError, Setting
from patrickstar.planning.simulation import accumulated, choose_plan, shared_host_plan
from patrickstar.planning.step_plan import Plan, SavedCalls, planned_chunks
from patrickstar.planning.step_uses import StepUses
from patrickstar.planning.timeline import Accesses, TimedTimeline, play_accesses
from patrickstar.planning.update_costs import UpdateRates, costs_of_chunks
from patrickstar.sizes import enough_size, show_shortage, show_size

_ONE_GPU = Cluster()
_EXACT = 128  # relative precision (1/128) of the least device memory with activation offload


def predict_case(
    uses: StepUses, layout: _C.Layout, machine: Machine, setting: Setting, cluster: Cluster = _ONE_GPU
) -> Case:
    """Predicts an engine on CUDA with this layout (csrc/engine/residency.cpp). ``layout`` is for the ranks of
    ``cluster``; budgets, steps and bytes are one rank's.

    Raises:
        DoesNotFitError: the message says how much is missing.
        ValueError: the layout is for another number of ranks.
    """
    return Predictor(uses, layout, machine, cluster).predict(setting)


class Predictor:
    """Predicts an engine on CUDA with one layout under any budgets; caches what does not depend on them."""

    def __init__(self, uses: StepUses, layout: _C.Layout, machine: Machine, cluster: Cluster = _ONE_GPU):
        if layout.num_ranks != cluster.chunk_ranks:
            raise ValueError(
                f"the layout is for {layout.num_ranks} ranks, of the cluster {cluster.chunk_ranks} GPUs share each "
                "chunk; give one rank for each of these"
            )
        self._uses, self.layout, self._machine, self._cluster = uses, layout, machine, cluster
        self.chunks = [layout.chunk(index) for index in range(layout.num_chunks)]
        self._timelines: dict[tuple[Any, ...], TimedTimeline] = {}
        self._accesses: dict[tuple[bool, ...], Accesses] = {}
        self._largest_module_bytes = _C.working_set_bytes(layout, uses.module_params)
        self._least: dict[tuple[Setting, int], int] = {}
        self._needed: dict[Setting, int] = {}

    def needed_device_bytes(self, setting: Setting) -> int:
        """Device bytes of activations and of the largest access's chunks, with all states on the host and the
        activation offload of this ``device_memory``. Exceeds ``device_memory`` if the model does not fit.
        """
        if setting not in self._needed:
            accesses = self._timeline(self._first_device(setting), self._nowhere).accesses
            least = self._least_limit_bytes(accesses, self._nowhere, self.device_budget(setting))
            self._needed[setting] = int(least / (1 - _C.CUDA_SLACK_RATIO)) + 1
        return self._needed[setting]

    def least_device_bytes(self, setting: Setting) -> int:
        """Least ``device_memory`` with all states on the host. With activation offload it is up to 1 % too high, never
        too low.
        """
        staying = dataclasses.replace(setting, offload=ActivationOffload.NEVER)
        high = self.needed_device_bytes(staying)
        if not self._may_leave(setting):
            return high
        key = (dataclasses.replace(setting, device_bytes=0), self._first_room(setting))
        if key not in self._least:
            low = 0
            while high - low > high // _EXACT:
                middle = (low + high) // 2
                needed = self.needed_device_bytes(dataclasses.replace(setting, device_bytes=middle))
                low, high = (max(low, middle), high) if needed > middle else (low, middle)
            self._least[key] = high
        return self._least[key]

    @property
    def recomputations(self) -> Ladder:
        """The choices for the checkpointed calls of a forward."""
        calls = self._uses.calls
        num_calls = max((call.number + 1 for call in calls), default=0)
        return Ladder(num_calls, has_products=any(call.product_bytes for call in calls))

    def most_sent(self, case: Case) -> int:
        """Most calls that may send products to the host, within the budgets of ``case``, in which none does."""
        if not self._may_leave(case.setting):
            return 0
        timed = self._timeline(self._first_device(case.setting), self._nowhere)
        room = case.setting.host_bytes - case.host_bytes - case.offloaded_bytes
        return most_sent(timed, self._machine.download_gbps, room)

    def compute_seconds(self, setting: Setting, saved: tuple[Saved, ...]) -> float:
        """Computation of a forward and its backward, without dequantisation, in which calls save ``saved``."""
        timed = self._timeline(self._first_device(setting), self._nowhere, None, saved)
        return self._cluster.slowdown(self._machine) * sum(timed.seconds)

    def predict(
        self,
        setting: Setting,
        saved: tuple[Saved, ...] = (),
        bound: Callable[[_C.Rates], _C.Rates] = lambda rates: rates,
    ) -> Case:
        """Returns the case of these budgets, in which checkpointed calls save ``saved``, at the machine's rates within
        ``bound``. Raises DoesNotFitError.
        """
        layout = self.layout
        least_host = self._least_host_bytes(setting)
        placed = self._place(setting, saved)
        first, on_device, budget = placed.first, placed.on_device, placed.budget
        resting_tiers, host_bytes = placed.resting_tiers, placed.host_bytes
        on_disk = [resting_tier == _C.Tier.DISK for resting_tier in resting_tiers]
        later, room, timed = placed.later, placed.room, placed.timed
        slowdown = self._cluster.slowdown(self._machine)
        timed = dataclasses.replace(timed, seconds=[seconds * slowdown for seconds in timed.seconds])
        offloaded_bytes = sent_bytes(self._uses.calls, saved)
        if offloaded_bytes > max(room, 0):
            raise DoesNotFitError(
                f"host_memory is {show_size(setting.host_bytes)}, and states leave {show_size(max(room, 0))} of it; "
                f"products of checkpointed calls take {show_size(offloaded_bytes)} there; raise host_memory"
            )
        offloaded_bytes += 0 if later is None else self._uses.leaving(later).away_bytes
        room -= offloaded_bytes + _C.leaving_gradient_bytes(layout, timed.accesses, on_device, budget)
        planned = planned_chunks(layout, on_device, on_disk)
        rates = self._update_rates(setting.optimizer, on_device)
        on_host = sum(chunk.shard_numel for chunk in planned if chunk.trainable and not chunk.states_on_device)
        slowdown = slowdown_of_updates(self._uses.calls, saved, on_host)

        def play(scale: _C.ExpectedScale) -> Plan:
            updates = earliest_updates(layout, resting_tiers, room, setting.update_start, scale)

            def choose(rates: _C.Rates) -> Plan:
                start = setting.update_start
                rates.param_pass = self._machine.phase_one(scale)
                rates.host_adam_params_per_second /= slowdown
                return choose_plan(layout, timed, on_device, on_disk, budget, updates, start, bound(rates))

            plan = shared_host_plan(choose, self._machine, self._cluster, planned, rates)
            return dataclasses.replace(plan, saved_calls=self._saved_calls(setting, on_device, later, saved))

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
            num_two_phase_updates=plan.times.updates.count(_C.Recipe.HOST_TWO_PASSES_AHEAD.name),
            num_disk_chunks=sum(on_disk),
            disk_bytes=sum(chunk.disk_bytes for chunk in planned),
            host_bytes=host_bytes,
            host_peak_bytes=_with_joiners(
                _C.host_peak_bytes(
                    layout,
                    first,
                    on_device,
                    setting.host_bytes,
                    updates_ahead=setting.updates_take_memory,
                    backwards=setting.backwards,
                ),
                offloaded_bytes,
                setting.host_bytes,
            ),
            offloaded_bytes=offloaded_bytes,
            selective_attention=0 if later is None else self._uses.leaving(later).kept_calls,
            saved=saved,
            least_host_bytes=least_host,
            waste_bytes=timed.waste_bytes,
            step=step_of(plan),
            play_clipped=lambda: step_of(play(_C.ExpectedScale.BETWEEN)),
            find_least_device=lambda: self.least_device_bytes(setting),
        )

    def _saved_calls(
        self, setting: Setting, on_device: Sequence[bool], later: LinkedDevice | None, saved: tuple[Saved, ...]
    ) -> SavedCalls | None:
        """The choice ``saved`` for a plan; None: nothing is saved."""
        if all(kept is Saved.NOTHING for kept in saved):
            return None
        timed, ladder = self._timeline(self._first_device(setting), on_device, later), self.recomputations
        return saved_calls(timed, ladder, saved, 0, is_quadratic=self._uses.is_quadratic)

    def num_state_chunks(self, setting: Setting, budget: _C.DeviceBudget) -> int:
        """Number of leading chunks whose states an engine with this budget keeps on the device."""
        accesses = self._timeline(self._first_device(setting), self._nowhere).accesses
        return _C.num_device_state_chunks(self.layout, accesses, budget)

    def away_bytes(self, setting: Setting) -> int:
        """Highest bytes of offloaded activations if all of ``host_memory`` is free for them."""
        later = self._later_device(setting, setting.host_bytes)
        return 0 if later is None else self._uses.leaving(later).away_bytes

    def _update_rates(self, rule: OptimizerType, on_device: Sequence[bool]) -> UpdateRates:
        sides = [[c for c, at in zip(self.chunks, on_device, strict=True) if at == side] for side in (False, True)]
        return self._machine.update_rates(*(costs_of_chunks(chunks, rule) for chunks in sides))

    @property
    def _nowhere(self) -> list[bool]:
        return [False] * len(self.chunks)

    def _timeline(
        self,
        first: LinkedDevice | None,
        on_device: Sequence[bool],
        later: LinkedDevice | None = None,
        saved: tuple[Saved, ...] = (),
    ) -> TimedTimeline:
        """``first``: the device of the first step's activation offload; None: no offload. ``later``: the same of later
        steps, which may keep attention and save time. ``saved``: by checkpointed calls.
        """
        places = tuple(on_device)
        levels = [None if device is None else self._uses.leaving(device) for device in (first, later)]
        key = (*map(id, levels), places, saved)
        if key in self._timelines:
            return self._timelines[key]
        if saved:
            self._timelines[key] = step_with_saved(self._timeline(first, on_device, later), saved)
        else:
            if places not in self._accesses:
                self._accesses[places] = play_accesses(self._uses, self.layout, on_device)
            self._timelines[key] = self._accesses[places].timed(self._uses.with_activation_levels(*levels))
        return self._timelines[key]

    def _may_leave(self, setting: Setting) -> bool:
        """True if activation offload is enabled."""
        return setting.offload is ActivationOffload.ALWAYS or (
            setting.offload is ActivationOffload.AUTO and self._uses.checkpoints
        )

    def _first_device(self, setting: Setting) -> LinkedDevice | None:
        """The device of the first step's offload, for which the plan is made; None if nothing is offloaded."""
        if not self._may_leave(setting):
            return None
        device = self._device_at_first(setting)
        return device if self._uses.leaving(device).away_bytes else None

    def _first_room(self, setting: Setting) -> int:
        """Host bytes beside the chunks' initial placement."""
        _, host_bytes, _ = self._initial_placement(setting)
        return max(setting.host_bytes - host_bytes, 0)

    def _later_device(self, setting: Setting, room: int) -> LinkedDevice | None:
        """The device of later steps, with the first step's measurements and ``room`` bytes of free host memory."""
        if not self._may_leave(setting):
            return None
        first = self._device_at_first(setting)
        return dataclasses.replace(first, room_bytes=max(room, 0), seen=self._uses.leaving(first).seen)

    def _device_at_first(self, setting: Setting) -> LinkedDevice:
        return LinkedDevice(
            shares=DeviceShares(setting.device_bytes, self._largest_module_bytes), room_bytes=self._first_room(setting)
        )

    def _initial_placement(self, setting: Setting) -> tuple[list[_C.Tier], int, int]:
        room = max(self.device_budget(setting).limit_bytes - self._largest_module_bytes, 0)
        return _C.initial_placement(self.layout, setting.host_bytes, room, setting.backwards, setting.disk_bytes)

    def _least_host_bytes(self, setting: Setting) -> int:
        limit = 0 if setting.disk_bytes else _C.UNLIMITED
        return _C.initial_placement(self.layout, limit, 0, setting.backwards, setting.disk_bytes)[1]

    def device_budget(self, setting: Setting) -> _C.DeviceBudget:
        """Returns the device budget of placement and planner, as csrc/engine/residency.cpp makes it."""
        budget = _C.DeviceBudget()
        budget.limit_bytes = int(setting.device_bytes * (1 - _C.CUDA_SLACK_RATIO))
        budget.margin_use_ratio = setting.margin_use_ratio
        budget.keeps_gradients = setting.speculation is not Speculation.COMMIT
        budget.backwards = setting.backwards
        if setting.updates_take_memory:
            budget.host_limit_bytes = setting.host_bytes
        return budget

    def _least_host_from(self, setting: Setting, num_bytes: int) -> int:
        """Returns ``num_bytes``, or more if activations need device memory that states would use then."""
        setting = dataclasses.replace(setting, host_bytes=num_bytes)
        try:
            placed = self._place(setting, ())
        except DoesNotFitError as refusal:
            return max(num_bytes, refusal.least_host_bytes or 0)
        least_limit = self._least_limit_bytes(placed.timed.accesses, placed.on_device, placed.budget)
        return num_bytes if least_limit <= placed.budget.limit_bytes else self._least_host_bytes(setting)

    def _least_limit_bytes(self, accesses: list[dict[str, Any]], on_device: list[bool], budget: _C.DeviceBudget) -> int:
        """Device bytes of the access that needs most."""
        problem = _C.pose_problem(self.layout, accesses, on_device, budget)
        num_bytes: int = _C.make_plan(_C.PlanProblem(accesses, **problem))["least_limit_bytes"]
        return num_bytes

    def _place(self, setting: Setting, saved: tuple[Saved, ...]) -> _Placed:
        """Places states as an engine does. Raises DoesNotFitError."""
        layout, budget = self.layout, self.device_budget(setting)
        if self.needed_device_bytes(setting) > setting.device_bytes:
            least = max(self.least_device_bytes(setting), setting.device_bytes + 1)
            raise DoesNotFitError(
                f"device_memory: {show_shortage(least, setting.device_bytes)}, for activations and the largest "
                f"access's chunks; give at least {enough_size(least)}",
                least_device_bytes=least,
            )
        first, host_bytes, _ = self._initial_placement(setting)
        if host_bytes > setting.host_bytes:
            once = "parameters and optimizer states"
            what = once if setting.accumulation == 1 else "parameters, optimizer states and gradients that accumulate"
            least = self._least_host_from(setting, host_bytes)
            on_host = [_C.Tier.HOST] * len(first)
            raise DoesNotFitError(
                f"host_memory: {show_shortage(least, setting.host_bytes)}; {what} take "
                f"{show_size(_C.bytes_on_host(layout, on_host, setting.backwards))}; raise host_memory to "
                f"{enough_size(least)}, or device_memory",
                least_host_bytes=least,
            )
        accesses = self._timeline(self._first_device(setting), self._nowhere, None, saved).accesses
        on_device = states_on_device(layout, first, accesses, budget if setting.hybrid_adam else None)
        resting_tiers = _C.later_resting_tiers(layout, first, on_device, setting.host_bytes, setting.backwards)
        host_bytes = _C.bytes_on_host(layout, resting_tiers, setting.backwards) + _C.disk_set_bytes(layout, first)
        budget.gradient_room_bytes = _C.gradient_room_bytes(layout, resting_tiers, setting.host_bytes)
        room = setting.host_bytes - host_bytes - _C.reserved_gradient_bytes(layout)
        later = self._later_device(setting, room)
        timed = self._timeline(self._first_device(setting), on_device, later, saved)
        return _Placed(
            first=first,
            on_device=on_device,
            resting_tiers=resting_tiers,
            host_bytes=host_bytes,
            budget=budget,
            room=room,
            later=later,
            timed=timed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Placed:
    """An engine's states in their places."""

    first: list[_C.Tier]
    """By chunk: the tier of its states before activation memory was known."""
    on_device: list[bool]
    """By chunk: True if its states end on the device, since host and disk cannot hold them or the headroom can."""
    resting_tiers: list[_C.Tier]
    host_bytes: int
    budget: _C.DeviceBudget
    room: int
    """Free host memory in bytes."""
    later: LinkedDevice | None
    """Activation offload of later steps; None: nothing leaves."""
    timed: TimedTimeline


def _starts_in_backward(recipe: str) -> bool:
    member: _C.Recipe = _C.Recipe.__members__[recipe]
    return member.starts_in_backward and member.states != _C.Tier.DEVICE


def _with_joiners(peak_bytes: int, offloaded_bytes: int, limit_bytes: int) -> int:
    """The host's peak with activations, which take room from speculative updates."""
    return min(peak_bytes + offloaded_bytes, max(peak_bytes, limit_bytes))

"""Places an engine's states as csrc/engine/residency.cpp does, and makes the timelines from which it does so."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from patrickstar import _C
from patrickstar.activations.activation_rules import DeviceShares, Saved
from patrickstar.config import ActivationOffload, Speculation
from patrickstar.planning.leaving import LinkedDevice
from patrickstar.planning.placed_states import states_on_device
from patrickstar.planning.saved_steps import step_with_saved
from patrickstar.planning.setting import DoesNotFitError, Setting
from patrickstar.planning.step_uses import StepUses
from patrickstar.planning.timeline import Accesses, TimedTimeline, play_accesses
from patrickstar.sizes import enough_size, show_shortage, show_size

_EXACT = 128  # relative precision (1/128) of the least device memory with activation offload


def device_budget(setting: Setting) -> _C.DeviceBudget:
    """Returns the device budget of placement and planner, as csrc/engine/residency.cpp makes it."""
    budget = _C.DeviceBudget()
    budget.limit_bytes = int(setting.device_bytes * (1 - _C.CUDA_SLACK_RATIO))
    budget.margin_use_ratio = setting.margin_use_ratio
    budget.keeps_gradients = setting.speculation is not Speculation.COMMIT
    budget.backwards = setting.backwards
    if setting.updates_take_memory:
        budget.host_limit_bytes = setting.host_bytes
    return budget


class Timelines:
    """Timelines of a step, by the devices to which its activations may leave. Caches them."""

    def __init__(self, uses: StepUses, layout: _C.Layout):
        self._uses, self._layout = uses, layout
        self._largest_module_bytes = _C.working_set_bytes(layout, uses.module_params)
        self._timelines: dict[tuple[Any, ...], TimedTimeline] = {}
        self._accesses: dict[tuple[bool, ...], Accesses] = {}

    def timeline(
        self,
        setting: Setting,
        on_device: Sequence[bool] | None = None,
        later: LinkedDevice | None = None,
        saved: tuple[Saved, ...] = (),
    ) -> TimedTimeline:
        """The timeline of a step with this setting's budgets.

        Args:
            setting: its first step's activation offload counts.
            on_device: by chunk, True if its states are on the device; None: none are.
            later: the device of later steps, which may keep attention and save time; None: no offload.
            saved: by checkpointed calls.
        """
        places = tuple(self.nowhere if on_device is None else on_device)
        levels = [
            None if device is None else self._uses.leaving(device) for device in (self._first_device(setting), later)
        ]
        key = (*map(id, levels), places, saved)
        if key in self._timelines:
            return self._timelines[key]
        if saved:
            self._timelines[key] = step_with_saved(self.timeline(setting, on_device, later), saved)
        else:
            if places not in self._accesses:
                self._accesses[places] = play_accesses(self._uses, self._layout, places)
            self._timelines[key] = self._accesses[places].timed(self._uses.with_activation_levels(*levels))
        return self._timelines[key]

    @property
    def nowhere(self) -> list[bool]:
        """By chunk, for states of which none are on the device."""
        return [False] * self._layout.num_chunks

    def may_leave(self, setting: Setting) -> bool:
        """True if activation offload is enabled."""
        return setting.offload is ActivationOffload.ALWAYS or (
            setting.offload is ActivationOffload.AUTO and self._uses.checkpoints
        )

    def _first_device(self, setting: Setting) -> LinkedDevice | None:
        """The device of the first step's offload, for which the plan is made; None if nothing is offloaded."""
        if not self.may_leave(setting):
            return None
        device = self._device_at_first(setting)
        return device if self._uses.leaving(device).away_bytes else None

    def first_room(self, setting: Setting) -> int:
        """Host bytes beside the chunks' initial placement."""
        _, host_bytes, _ = self.initial_placement(setting)
        return max(setting.host_bytes - host_bytes, 0)

    def later_device(self, setting: Setting, room: int) -> LinkedDevice | None:
        """The device of later steps, with the first step's measurements and ``room`` bytes of free host memory."""
        if not self.may_leave(setting):
            return None
        first = self._device_at_first(setting)
        return dataclasses.replace(first, room_bytes=max(room, 0), seen=self._uses.leaving(first).seen)

    def _device_at_first(self, setting: Setting) -> LinkedDevice:
        return LinkedDevice(
            shares=DeviceShares(setting.device_bytes, self._largest_module_bytes), room_bytes=self.first_room(setting)
        )

    def away_bytes(self, setting: Setting) -> int:
        """Highest bytes of offloaded activations if all of ``host_memory`` is free for them."""
        later = self.later_device(setting, setting.host_bytes)
        return 0 if later is None else self._uses.leaving(later).away_bytes

    def initial_placement(self, setting: Setting) -> tuple[list[_C.Tier], int, int]:
        """Resting tiers by chunk before activation memory is known, host bytes, disk bytes."""
        room = max(device_budget(setting).limit_bytes - self._largest_module_bytes, 0)
        return _C.initial_placement(self._layout, setting.host_bytes, room, setting.backwards, setting.disk_bytes)


class Placer:
    """Places the states of one layout under any budgets."""

    def __init__(self, layout: _C.Layout, timelines: Timelines):
        self._layout, self._timelines = layout, timelines
        self._least: dict[tuple[Setting, int], int] = {}
        self._needed: dict[Setting, int] = {}

    def needed_device_bytes(self, setting: Setting) -> int:
        """Device bytes of activations and of the largest access's chunks, with all states on the host and the
        activation offload of this ``device_memory``. Exceeds ``device_memory`` if the model does not fit.
        """
        if setting not in self._needed:
            accesses = self._timelines.timeline(setting).accesses
            least = self._least_limit_bytes(accesses, self._timelines.nowhere, device_budget(setting))
            self._needed[setting] = int(least / (1 - _C.CUDA_SLACK_RATIO)) + 1
        return self._needed[setting]

    def least_device_bytes(self, setting: Setting) -> int:
        """Least ``device_memory`` with all states on the host. With activation offload it is up to 1 % too high, never
        too low.
        """
        staying = dataclasses.replace(setting, offload=ActivationOffload.NEVER)
        high = self.needed_device_bytes(staying)
        if not self._timelines.may_leave(setting):
            return high
        key = (dataclasses.replace(setting, device_bytes=0), self._timelines.first_room(setting))
        if key not in self._least:
            low = 0
            while high - low > high // _EXACT:
                middle = (low + high) // 2
                needed = self.needed_device_bytes(dataclasses.replace(setting, device_bytes=middle))
                low, high = (max(low, middle), high) if needed > middle else (low, middle)
            self._least[key] = high
        return self._least[key]

    def num_state_chunks(self, setting: Setting, budget: _C.DeviceBudget) -> int:
        """Number of leading chunks whose states an engine with this budget keeps on the device."""
        accesses = self._timelines.timeline(setting).accesses
        return _C.num_device_state_chunks(self._layout, accesses, budget)

    def least_host_bytes(self, setting: Setting) -> int:
        """Host bytes of any placement without states on the device."""
        limit = 0 if setting.disk_bytes else _C.UNLIMITED
        return _C.initial_placement(self._layout, limit, 0, setting.backwards, setting.disk_bytes)[1]

    def _least_host_from(self, setting: Setting, num_bytes: int) -> int:
        """Returns ``num_bytes``, or more if activations need device memory that states would use then."""
        setting = dataclasses.replace(setting, host_bytes=num_bytes)
        try:
            placed = self.place(setting, ())
        except DoesNotFitError as refusal:
            return max(num_bytes, refusal.least_host_bytes or 0)
        least_limit = self._least_limit_bytes(placed.timed.accesses, placed.on_device, placed.budget)
        return num_bytes if least_limit <= placed.budget.limit_bytes else self.least_host_bytes(setting)

    def _least_limit_bytes(self, accesses: list[dict[str, Any]], on_device: list[bool], budget: _C.DeviceBudget) -> int:
        """Device bytes of the access that needs most."""
        problem = _C.pose_problem(self._layout, accesses, on_device, budget)
        num_bytes: int = _C.make_plan(_C.PlanProblem(accesses, **problem))["least_limit_bytes"]
        return num_bytes

    def place(self, setting: Setting, saved: tuple[Saved, ...]) -> Placed:
        """Places states as an engine does. Raises DoesNotFitError."""
        layout, budget = self._layout, device_budget(setting)
        if self.needed_device_bytes(setting) > setting.device_bytes:
            least = max(self.least_device_bytes(setting), setting.device_bytes + 1)
            raise DoesNotFitError(
                f"device_memory: {show_shortage(least, setting.device_bytes)}, for activations and the largest "
                f"access's chunks; give at least {enough_size(least)}",
                least_device_bytes=least,
            )
        first, host_bytes, _ = self._timelines.initial_placement(setting)
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
        accesses = self._timelines.timeline(setting, saved=saved).accesses
        on_device = states_on_device(layout, first, accesses, budget if setting.hybrid_adam else None)
        resting_tiers = _C.later_resting_tiers(layout, first, on_device, setting.host_bytes, setting.backwards)
        host_bytes = _C.bytes_on_host(layout, resting_tiers, setting.backwards) + _C.disk_set_bytes(layout, first)
        budget.gradient_room_bytes = _C.gradient_room_bytes(layout, resting_tiers, setting.host_bytes)
        room = setting.host_bytes - host_bytes - _C.reserved_gradient_bytes(layout)
        later = self._timelines.later_device(setting, room)
        timed = self._timelines.timeline(setting, on_device, later, saved)
        return Placed(
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
class Placed:
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

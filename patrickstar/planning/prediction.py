"""Predicts a step: placement and plan as an engine chooses them, then the simulator (csrc/plan/simulator.h)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from patrickstar import _C
from patrickstar.activations.activation_rules import Saved
from patrickstar.config import OptimizerType
from patrickstar.planning.case import Case
from patrickstar.planning.cluster import Cluster
from patrickstar.planning.ladder import Ladder, saved_calls
from patrickstar.planning.leaving import LinkedDevice
from patrickstar.planning.machines import Machine
from patrickstar.planning.placed_states import earliest_updates
from patrickstar.planning.placing import Placer, Timelines
from patrickstar.planning.predicted_step import Prediction
from patrickstar.planning.saved_steps import most_sent, sent_bytes, slowdown_of_updates
from patrickstar.planning.setting import DoesNotFitError, Setting
from patrickstar.planning.simulation import accumulated, choose_plan, shared_host_plan
from patrickstar.planning.step_plan import Plan, SavedCalls, planned_chunks
from patrickstar.planning.step_uses import StepUses
from patrickstar.planning.update_costs import UpdateRates, costs_of_chunks
from patrickstar.sizes import enough_size, show_size

_ONE_GPU = Cluster()


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
        self.timelines = Timelines(uses, layout)
        self.placer = Placer(layout, self.timelines)

    @property
    def recomputations(self) -> Ladder:
        """The choices for the checkpointed calls of a forward."""
        calls = self._uses.calls
        num_calls = max((call.number + 1 for call in calls), default=0)
        return Ladder(num_calls, has_products=any(call.product_bytes for call in calls))

    def most_sent(self, case: Case) -> int:
        """Most calls that may send products to the host, within the budgets of ``case``, in which none does."""
        if not self.timelines.may_leave(case.setting):
            return 0
        timed = self.timelines.timeline(case.setting)
        room = case.setting.host_bytes - case.host_bytes - case.offloaded_bytes
        return most_sent(timed, self._machine.download_gbps, room)

    def compute_seconds(self, setting: Setting, saved: tuple[Saved, ...]) -> float:
        """Computation of a forward and its backward, without dequantisation, in which calls save ``saved``."""
        timed = self.timelines.timeline(setting, saved=saved)
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
        least_host = self.placer.least_host_bytes(setting)
        placed = self.placer.place(setting, saved)
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
                rates.param_pass, rates.states_pass = self._machine.passes(scale, layout)
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
            find_least_device=lambda: self.placer.least_device_bytes(setting),
        )

    def _saved_calls(
        self, setting: Setting, on_device: Sequence[bool], later: LinkedDevice | None, saved: tuple[Saved, ...]
    ) -> SavedCalls | None:
        """The choice ``saved`` for a plan; None: nothing is saved."""
        if all(kept is Saved.NOTHING for kept in saved):
            return None
        timed, ladder = self.timelines.timeline(setting, on_device, later), self.recomputations
        return saved_calls(timed, ladder, saved, 0, is_quadratic=self._uses.is_quadratic)

    def _update_rates(self, rule: OptimizerType, on_device: Sequence[bool]) -> UpdateRates:
        sides = [[c for c, at in zip(self.chunks, on_device, strict=True) if at == side] for side in (False, True)]
        return self._machine.update_rates(*(costs_of_chunks(chunks, rule) for chunks in sides))


def _starts_in_backward(recipe: str) -> bool:
    member: _C.Recipe = _C.Recipe.__members__[recipe]
    return member.starts_in_backward and member.states != _C.Tier.DEVICE


def _with_joiners(peak_bytes: int, offloaded_bytes: int, limit_bytes: int) -> int:
    """The host's peak with activations, which take room from speculative updates."""
    return min(peak_bytes + offloaded_bytes, max(peak_bytes, limit_bytes))

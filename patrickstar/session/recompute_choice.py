"""The choice of recomputation in a running engine.

The first step, in which checkpointed calls save nothing, is measured. The choice is made before its update, when
optimizer states get their place. Updates on the host were measured alone then. Once the engine has measured updates
beside a step, calls may save less, so that more states rest on the device.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import logging
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from patrickstar import _C
from patrickstar.activations.call_measurement import CallMeasurement, clock_of
from patrickstar.activations.checkpoint_calls import CheckpointCalls
from patrickstar.activations.selective_recomputation import ComparedProducts
from patrickstar.config import Config, OptimizerType, Recompute
from patrickstar.machine.engine_options import update_start
from patrickstar.module.checkpointed_layers import is_checkpointed, turn_on_checkpoints
from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.planning.ladder import Ladder, SavedLimit, saved_calls
from patrickstar.planning.recomputation import (
    MeasuredStep,
    PlacedEngine,
    PlacedStep,
    choose_rung,
    choose_saved,
    placed_step,
    predicted_seconds,
    recomputation_text,
)
from patrickstar.planning.saved_steps import most_sent
from patrickstar.planning.step_plan import Plan, SavedCalls
from patrickstar.ranks.distributed import RankGroups
from patrickstar.session.step_measurement import measured_step

logger = logging.getLogger("patrickstar")

_LEAST_STEP_SECONDS = 1e-4
"""Steps that compute for less are not worth a choice."""

_WORTH_CHANGING = 0.03
"""Least share of a step by which another choice must be shorter: the first steps after a change take longer. Not
measured.
"""


class ChoiceStage(enum.Enum):
    """Progress of the choice."""

    MEASURING = enum.auto()
    """Until the end of the first step in which all ranks have checkpoints, or none."""
    CHOSEN = enum.auto()
    """Until the engine has measured updates beside a step."""
    OVER = enum.auto()


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """A choice, and from which step it was made."""

    engine: PlacedEngine
    step: MeasuredStep
    ladder: Ladder
    rung: int


class NoRecomputeChoice:
    """Checkpointed calls save what they were told."""

    def adopt(self, plan: Plan) -> None:
        """Called before the first step if it replays ``plan``, of an earlier run."""

    def begin_forward(self, inputs: Any) -> None:
        """Called before each training forward. ``inputs``: of the module's call; None: unknown."""

    def before_step(self, clip_ratio: float) -> None:
        """Called when the gradients of a step are complete. ``clip_ratio``: the largest norm over theirs."""

    def give_up(self) -> None:
        """Called after a forward ran out of memory."""

    def saved_calls(self) -> SavedCalls | None:
        """The present choice, for a plan; None: nothing is saved."""
        return None


class RecomputeChoice(NoRecomputeChoice):
    """See the module's docstring. All ranks choose alike.

    A forward with more tokens than any before saves less, so that its activations take no more memory than planned.

    A forward of a Hugging Face model that runs out of memory without checkpoints gets them; the other ranks follow.

    Args:
        module: the engine's.
        runtime: before its first step.
        layout: its chunks.
        calls: the checkpointed calls of its forwards.
        device: of the engine.
        storages: addresses (``_cdata``) of storages that hold parameters.
        ranks: that train together. Those that share matrices or sequences exchange data in recomputations too.
        start: earliest start of updates that the configuration asks for.
        rule: the update rule.
        has_device_states: False if all optimizer states rest on the host.
    """

    def __init__(
        self,
        module: nn.Module,
        runtime: _C.Runtime,
        layout: _C.Layout,
        calls: CheckpointCalls,
        device: torch.device,
        storages: Collection[int],
        ranks: RankGroups,
        start: _C.UpdateStart,
        rule: OptimizerType,
        *,
        has_device_states: bool,
    ):
        self._module = module
        self._runtime = runtime
        self._layout = layout
        self._calls = calls
        self._ranks = ranks
        self._num_ranks = len(ranks.members)
        self._start = start
        self._rule = rule
        self._has_device_states = has_device_states
        self._measure = functools.partial(_measurement, runtime, device, storages)
        self._measurement = self._measure()
        self._stage = ChoiceStage.MEASURING
        self._first_shapes: list[list[tuple[int, ...]]] = []  # inputs of each forward of the measured step
        self._limit: SavedLimit | None = None  # once calls save anything
        self._chosen: _Chosen | None = None  # by this run, while it may change

    def adopt(self, plan: Plan) -> None:
        """See :class:`NoRecomputeChoice`. Nothing is measured then."""
        self._stage = ChoiceStage.OVER
        if plan.saved_calls is not None and not self._calls.obstacle:
            self._limit = SavedLimit(plan.saved_calls, plan.activation_peak_bytes)
            self._calls.choose(self._limit.ladder.saved(self._limit.rung))

    def saved_calls(self) -> SavedCalls | None:
        """See :class:`NoRecomputeChoice`."""
        return None if self._limit is None else self._limit.calls

    def begin_forward(self, inputs: Any) -> None:
        """See :class:`NoRecomputeChoice`. Collective over ``ranks`` once calls save anything."""
        shapes = [shape_of(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
        if self._stage is ChoiceStage.MEASURING and self._runtime.num_accesses == 0:
            self._begin_measuring()
        if self._stage is ChoiceStage.MEASURING:
            self._first_shapes.append(shapes)
        if self._limit is None:
            return
        message = json.dumps([_size_of(shapes, self._limit.calls.is_quadratic), self._limit.rung])
        agreed = [json.loads(text) for text in self._exchange(message, "the size of a batch")]
        self._follow(self._limit, max(elements for elements, _ in agreed), min(rung for _, rung in agreed))

    def _begin_measuring(self) -> None:
        """Called at the begin of each step until one has gradients: the user may drop those of the first."""
        if self._calls.obstacle:
            return
        self._measurement, self._first_shapes = self._measure(), []
        self._runtime.ask_for_step_so_far()
        self._calls.observe(self._measurement)

    def _follow(self, limit: SavedLimit, size: int, rung: int) -> None:
        before, first = limit.ladder.saved(limit.rung), limit.size
        limit.follow(size, rung)
        saved = limit.ladder.saved(limit.rung)
        if saved != before:
            logger.info("a forward is %.3g times as large as any before: more is recomputed", size / max(first, 1))
        self._calls.choose(saved)

    def give_up(self) -> None:
        """See :class:`NoRecomputeChoice`. On one rank the repeated forward already saves nothing; several ranks agree
        before the next. One of several ranks turns checkpoints on only in a measured step, at whose end all agree.
        """
        may_turn_on = self._num_ranks == 1 or self._stage is ChoiceStage.MEASURING
        if may_turn_on and turn_on_checkpoints(self._module):
            logger.warning(
                "the forward ran out of memory: gradient_checkpointing_enable() of %s is called, with "
                '{"use_reentrant": False}',
                type(self._module).__name__,
            )
            return
        if self._limit is None or self._limit.rung == 0:
            return
        logger.warning("checkpointed calls save nothing from now on: a forward ran out of memory")
        self._limit.rung = 0
        if self._num_ranks == 1:
            self._calls.choose(())

    def before_step(self, clip_ratio: float) -> None:
        """See :class:`NoRecomputeChoice`. Chooses in the first step, and in the step after the engine's first
        measurement. Collective over ``ranks``.
        """
        if self._stage is ChoiceStage.MEASURING:
            self._choose(clip_ratio)
        elif self._stage is ChoiceStage.CHOSEN:
            self._choose_again(clip_ratio)

    def _choose(self, clip_ratio: float) -> None:
        self._stage = ChoiceStage.OVER
        self._calls.observe(None)
        step, scale = None, self._runtime.next_scale(clip_ratio)
        if self._measurement.has_calls:
            step = measured_step(self._runtime, self._layout, self._rule, self._measurement, scale)
        is_short = step is None or sum(step.timed.seconds) < _LEAST_STEP_SECONDS
        calls = [] if step is None or is_short else step.timed.calls
        num_calls = max((call.number + 1 for call in calls), default=0)
        keeps_products = self._calls.sees_operations and not self._measurement.products_differ
        has_products = keeps_products and any(call.product_bytes for call in calls)
        found = json.dumps([num_calls, has_products, self._most_sent(step), is_checkpointed(self._module)])
        agreed = [json.loads(text) for text in self._exchange(found, "the number of checkpointed calls")]
        if len({has_checkpoints for *_, has_checkpoints in agreed}) > 1:  # memory ran out on some ranks
            turn_on_checkpoints(self._module)
            self._stage = ChoiceStage.MEASURING
            return
        counts = {count for count, *_ in agreed}
        if step is None or 0 in counts or len(counts) > 1:
            return
        budget, host_bytes, resting_tiers = self._runtime.placement_facts()
        engine = PlacedEngine(
            layout=self._layout,
            budget=budget,
            host_bytes=host_bytes,
            resting_tiers=resting_tiers,
            has_device_states=self._has_device_states,
            start=_C.possible_start(self._start, budget.backwards, _can_roll_back(self._layout)),
            scale=scale,
        )
        ladder = Ladder(num_calls, has_products=all(has for _, has, *_ in agreed))
        num_sent = min(most for _, _, most, _ in agreed) if ladder.has_products else 0
        choice = choose_saved(ladder, num_sent, functools.partial(self._longest, engine, step))
        if choice.seconds == math.inf:  # no step fits the budgets; the engine says so
            return
        times = [predicted_seconds(engine, step, saved) for saved in (choice.saved, ())]
        logger.info("%s", recomputation_text(choice.saved, *times))
        logger.debug("predicted seconds by rung: %s", choice.tried)
        logger.debug("of the calls: %s", step.timed.calls)
        chosen = _Chosen(engine, step, choice.ladder, choice.rung)
        if choice.rung > 0:
            self._chosen, self._stage = chosen, ChoiceStage.CHOSEN
        self._apply(chosen)

    def _most_sent(self, step: MeasuredStep | None) -> int:
        """Most calls that may send products to the host."""
        if step is None or not self._calls.may_send:
            return 0
        return most_sent(step.timed, step.rates.download_gbps, self._runtime.host_room_of_activations())

    def _choose_again(self, clip_ratio: float) -> None:
        """Ranks get the same times in the same step."""
        chosen, times = self._chosen, self._runtime.step_times()
        assert chosen is not None and self._limit is not None
        if times is None or self._runtime.num_measurements == 0:
            return
        rates = times["rates"]
        self._stage, self._chosen = ChoiceStage.OVER, None
        if self._limit.rung != chosen.rung:  # a larger forward came, or memory ran out
            return
        rates.host_adam_params_per_second *= _placed(chosen).host_slowdown
        step = dataclasses.replace(chosen.step, rates=rates)
        engine = dataclasses.replace(chosen.engine, scale=self._runtime.next_scale(clip_ratio))
        longest = functools.partial(self._longest, engine, step, chosen.ladder)
        choice = choose_rung(chosen.rung, longest)
        logger.debug("predicted seconds by rung beside measured updates: %s", choice.tried)
        seconds, present = choice.tried[choice.rung], choice.tried[chosen.rung]
        if seconds > present * (1 - _WORTH_CHANGING):
            return
        saved = chosen.ladder.saved(choice.rung)
        logger.info("%s, %.3g s as before", recomputation_text(saved, seconds, choice.tried[0]), present)
        self._apply(dataclasses.replace(chosen, engine=engine, step=step, rung=choice.rung))

    def _apply(self, chosen: _Chosen) -> None:
        """Lets calls save what was chosen, where that changes what they save, and plans the next step for it."""
        placed = _placed(chosen)
        if chosen.rung > 0 or self._limit is not None:
            self._save(chosen, placed.timed.activation_peak_bytes)
        self._expect(chosen.step, placed)

    def _save(self, chosen: _Chosen, activation_peak_bytes: int) -> None:
        """Lets calls save what was chosen."""
        step, ladder = chosen.step, chosen.ladder
        saved = ladder.saved(chosen.rung)
        self._calls.choose(saved)
        self._calls.expect_products({call.number: call.num_products for call in step.timed.calls})
        is_quadratic = self._measurement.is_quadratic
        size = max(_size_of(shapes, is_quadratic) for shapes in self._first_shapes)
        mine = dataclasses.asdict(saved_calls(step.timed, ladder, saved, size, is_quadratic=is_quadratic))
        agreed = self._exchange(json.dumps([activation_peak_bytes, mine]), "the bytes of saved activations")
        peaks, calls = zip(*(json.loads(text) for text in agreed), strict=True)
        self._limit = SavedLimit(SavedCalls.largest_of(map(SavedCalls.from_plain, calls)), max(peaks))

    def _expect(self, step: MeasuredStep, placed: PlacedStep) -> None:
        """States are placed, and the next step is planned, for the predicted one."""
        step.rates.host_adam_params_per_second /= placed.host_slowdown
        times = {
            "rates": step.rates, "compute_seconds": placed.timed.seconds, "updates": placed.updates,
            "activations": [copies.as_core() for copies in placed.timed.copies],
        }  # fmt: skip
        self._runtime.expect_step(placed.timed.accesses, times)

    def _longest(self, engine: PlacedEngine, step: MeasuredStep, ladder: Ladder, rungs: list[int]) -> list[float]:
        """Predicted seconds of each rung, of the slowest rank."""
        seconds = [predicted_seconds(engine, step, ladder.saved(rung)) for rung in rungs]
        by_rank = [json.loads(text) for text in self._exchange(json.dumps(seconds), "the recomputation")]
        return [max(of_ranks) for of_ranks in zip(*by_rank, strict=True)]

    def _exchange(self, message: str, what: str) -> list[str]:
        if self._num_ranks == 1:
            return [message]
        return [received.decode() for received in self._ranks.control.exchange(message.encode(), what)]


def _placed(chosen: _Chosen) -> PlacedStep:
    with placed_step(chosen.engine, chosen.step, chosen.ladder.saved(chosen.rung)) as placed:
        return placed


def _measurement(runtime: _C.Runtime, device: torch.device, storages: Collection[int]) -> CallMeasurement:
    return CallMeasurement(
        lambda: runtime.num_accesses - 1, clock_of(device), device, storages.__contains__, ComparedProducts()
    )


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape in plain numbers; of a nested tensor that of all its elements, of one that is traced the example's."""
    return tuple(map(int, (tensor.values() if tensor.is_nested else tensor).shape))


def _size_of(shapes: Sequence[tuple[int, ...]], is_quadratic: bool) -> int:
    """Size to which activations are proportional, of inputs of these shapes."""
    return sum(math.prod(shape) * (shape[-1] if is_quadratic else 1) for shape in shapes)


def _can_roll_back(layout: _C.Layout) -> bool:
    chunks = (layout.chunk(index) for index in range(layout.num_chunks))
    return _C.puts_values_in_place(layout) or all(chunk["states"].master != _C.StateType.NONE for chunk in chunks)


def make_recompute_choice(
    module: nn.Module,
    config: Config,
    runtime: _C.Runtime,
    layout: _C.Layout,
    calls: CheckpointCalls,
    ranks: RankGroups,
    device: torch.device,
) -> NoRecomputeChoice:
    """The choice of a new session; arguments as of :class:`RecomputeChoice`."""
    if config.activations.recompute is Recompute.ALWAYS or not may_choose(device):
        return NoRecomputeChoice()
    params = (param for param in module.parameters() if isinstance(param, ChunkedParameter))
    return RecomputeChoice(
        module,
        runtime,
        layout,
        calls,
        device,
        {param._patrickstar.storage for param in params},
        ranks,
        update_start(config.optimizer.speculation, device),
        config.optimizer.type,
        has_device_states=config.optimizer.params.use_hybrid_adam,
    )


def may_choose(device: torch.device) -> bool:
    """False on a simulated device, whose times say nothing about a GPU's."""
    return device.type == "cuda"

"""Learning rates of a run whose global batch changes.

    rates = ScaledRates(optimizer, batches, schedule)
    run = ElasticRun(engine, {"sampler": sampler, "rates": rates})
    ...
    optimizer.step()
    rates.step()                    # in place of schedule.step()

The schedule counts samples: it makes one step for each base batch of samples. The optimizer's learning rates are the
schedule's times :attr:`ScaledRates.factor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patrickstar.elastic.batches import BatchRange, learning_rate_factor


class ScaledRates:
    """Scales the learning rates of an optimizer's groups by the rule of a :class:`BatchRange`.

    After a growth the factor rises linearly to the rule's value over ``warmup_steps``; after a decrease it falls at
    once. Groups that are added later are not supported.

    Args:
        optimizer: with ``param_groups``.
        batches: the rule, and the batch for which the rates are given.
        schedule: of PyTorch, made for steps of the base batch; None: constant rates.
    """

    def __init__(self, optimizer: Any, batches: BatchRange, schedule: Any = None):
        self.batches = batches
        self.global_batch = batches.base
        """Samples of the next step."""
        self.num_samples = 0
        """Samples of all steps so far."""
        self.factor = 1.0
        """Present factor of the schedule's rates."""
        self._optimizer, self._schedule = optimizer, schedule
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]  # without the factor
        self._first_factor = 1.0  # at the last change
        self._steps_since = batches.warmup_steps

    @property
    def num_schedule_steps(self) -> int:
        """Steps of the schedule so far: whole base batches."""
        return self.num_samples // self.batches.base

    def set_batch(self, global_batch: int) -> None:
        """Sets the batch of the following steps; the factor follows. Raises ValueError outside of the range."""
        self.batches.check(global_batch)
        if global_batch == self.global_batch:
            return
        self.global_batch, self._first_factor, self._steps_since = global_batch, self.factor, 0
        self._scale()

    def step(self) -> None:
        """Must be called after each optimizer step, before ``ElasticRun.step_done``."""
        before = self.num_schedule_steps
        self.num_samples += self.global_batch
        self._steps_since += 1
        due = self.num_schedule_steps - before
        if self._schedule is not None and due:
            self._set(self._rates)  # some schedules derive a rate from the last one
            for _ in range(due):
                self._schedule.step()
            self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._scale()

    def get_last_lr(self) -> list[float]:
        """The rates of the next step, by group."""
        return [rate * self.factor for rate in self._rates]

    def _scale(self) -> None:
        rule, warmup = self.batches.rule, self.batches.warmup_steps
        target = learning_rate_factor(rule, self.batches.base, self.global_batch)
        rises = target > self._first_factor and self._steps_since < warmup
        done = self._steps_since / warmup if rises else 1.0
        self.factor = self._first_factor + (target - self._first_factor) * done
        self._set(self.get_last_lr())

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """All of it, with the schedule's state; equal on all ranks."""
        return {
            "global_batch": self.global_batch,
            "num_samples": self.num_samples,
            "rates": list(self._rates),
            "first_factor": self._first_factor,
            "steps_since": self._steps_since,
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state is of a run with other groups, or with a batch outside of the range."""
        self.batches.check(state["global_batch"])
        if len(state["rates"]) != len(self._optimizer.param_groups):
            raise ValueError(
                f"the rates are of {len(state['rates'])} parameter groups, and this optimizer has "
                f"{len(self._optimizer.param_groups)}; give it the same groups"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state, and sets the optimizer's rates.

        Raises:
            ValueError: as :meth:`check_state`; nothing is changed then.
        """
        self.check_state(state)
        self.global_batch, self.num_samples = state["global_batch"], state["num_samples"]
        self._rates = list(state["rates"])
        self._first_factor, self._steps_since = state["first_factor"], state["steps_since"]
        if self._schedule is not None and state["schedule"] is not None:
            self._schedule.load_state_dict(state["schedule"])
        self._scale()

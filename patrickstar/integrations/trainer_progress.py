"""The position of an elastic Trainer's loop ([Note: steps of an elastic Trainer], elastic_trainer.py)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

# Sums that the Trainer zeroes at the start of its loop; its versions have more and fewer.
_SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen")


class TrainerProgress:
    """The position of a trainer's loop, as user state of a resize; equal on all ranks."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.max_steps = 0
        """Steps of the base batch that the loop makes."""
        self._taken: dict[str, Any] | None = None  # by a joining process

    @property
    def last_loss(self) -> float | None:
        """The last logged loss, or None."""
        return next((entry["loss"] for entry in reversed(self._trainer.state.log_history) if "loss" in entry), None)

    def state_dict(self) -> dict[str, Any]:
        """The state of a rank whose sums are those of all."""
        if self._taken is not None:  # the loop has not applied it yet
            return self._taken
        trainer = self._trainer
        return {
            "state": json.dumps(dataclasses.asdict(trainer.state)),
            "max_steps": self.max_steps,
            "callbacks": json.dumps([(type(item).__name__, item.state()["attributes"]) for item in self._exported()]),
            "sums": {
                "_tr_loss": trainer._tr_loss.item(),
                **{name: getattr(trainer, name) for name in _SUMS if hasattr(trainer, name)},
            },
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Validates the state before a process joins.

        Raises:
            ValueError: its script would train another number of steps, or has other callbacks.
        """
        told, own = state["max_steps"], self.max_steps
        if told != own:
            raise ValueError(
                f"the ranks that train make {told} steps, and this process would make {own}; start it with the same "
                "arguments and data"
            )
        theirs = [name for name, _ in json.loads(state["callbacks"])]
        mine = [type(item).__name__ for item in self._exported()]
        if theirs != mine:
            raise ValueError(
                f"the ranks that train have the callbacks {theirs}, and this process {mine}; start it with the same "
                "script"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps the state until the loop can take it."""
        self._taken = state

    def _exported(self) -> list[ExportableState]:
        return [item for item in self._trainer.callback_handler.callbacks if isinstance(item, ExportableState)]

    def take_state(self, num_epochs: int) -> None:
        """Applies the state that the Trainer creates before its loop."""
        assert self._taken is not None
        trainer, state = self._trainer, TrainerState(**json.loads(self._taken["state"]))
        state.init_training_references(trainer, self.max_steps, num_epochs, None)
        trainer.state = state
        for item, (_, attributes) in zip(self._exported(), json.loads(self._taken["callbacks"]), strict=True):
            for name, value in attributes.items():
                setattr(item, name, value)

    def take_sums(self) -> bool:
        """Applies the sums that the Trainer zeroes at the start of its loop; False if there are none."""
        taken, self._taken = self._taken, None
        if taken is None:
            return False
        trainer = self._trainer
        sums = dict(taken["sums"])
        trainer._tr_loss = torch.tensor(sums.pop("_tr_loss"), device=trainer.args.device)
        for name, value in sums.items():
            setattr(trainer, name, value)
        return True

"""Training state that a checkpoint stores beside tensors, and its validation."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from patrickstar.checkpoint.codec import decode, encode
from patrickstar.checkpoint.errors import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Training state of one run, between two steps."""

    num_steps: int
    """Optimizer steps so far, including skipped ones."""
    step_counts: dict[str, int]
    """Number of updates of each parameter that was ever updated."""
    groups: list[dict[str, Any]]
    """The optimizer's groups: ``params`` (names) and ``options``."""
    loss_scaler: dict[str, float] | None
    """State of the loss scaler, by name; None without loss scaling."""
    lr_scheduler: Any
    """The scheduler's ``state_dict()``, or None."""
    extra_states: dict[str, Any]
    """State of modules with ``get_extra_state``, by name."""
    client_state: dict[str, Any]
    """The values that ``save_checkpoint`` took as ``client_state``, by name."""
    optimizer: str | None = None
    """Type of the optimizer; None: unknown, as in checkpoints of other programs and before 0.7.0."""
    further_names: dict[str, str] = dataclasses.field(default_factory=dict)
    """Further names of tied parameters; each maps to the name of the tensors. Empty in earlier checkpoints."""

    def to_json(self) -> dict[str, Any]:
        """The state in JSON's types.

        Raises:
            CheckpointError: user state has a type that checkpoints do not support.
        """
        return {
            "num_steps": self.num_steps,
            "step_counts": self.step_counts,
            "groups": [
                {"params": group["params"], "options": encode(group["options"], f"param_groups[{index}]")}
                for index, group in enumerate(self.groups)
            ],
            "loss_scaler": self.loss_scaler,
            "lr_scheduler": encode(self.lr_scheduler, "lr_scheduler.state_dict()"),
            "extra_states": {
                name: encode(state, f"the extra state of module {name!r}") for name, state in self.extra_states.items()
            },
            "client_state": encode(self.client_state, "client_state"),
            "optimizer": self.optimizer,
            "further_names": self.further_names,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> TrainingState:
        """Parses :meth:`to_json`'s result.

        Raises:
            CheckpointError: it is malformed.
        """
        types = {"num_steps": int, "step_counts": dict, "groups": list, "extra_states": dict}
        for key, expected in types.items():
            if type(state.get(key)) is not expected:
                raise CheckpointError(f"the checkpoint's state has no {key} of type {expected.__name__}")
        counts = state["step_counts"]
        if state["num_steps"] < 0 or any(type(count) is not int or count <= 0 for count in counts.values()):
            raise CheckpointError("the checkpoint's step counts are no counts")
        return cls(
            num_steps=state["num_steps"],
            step_counts=counts,
            groups=[_group(group) for group in state["groups"]],
            loss_scaler=_loss_scaler(state.get("loss_scaler")),
            lr_scheduler=decode(state.get("lr_scheduler"), "lr_scheduler"),
            extra_states={name: decode(value, f"extra state {name}") for name, value in state["extra_states"].items()},
            client_state=_mapping(decode(state.get("client_state"), "client_state"), "client_state"),
            optimizer=_optimizer(state.get("optimizer")),
            further_names=_mapping(state.get("further_names", {}), "further_names"),
        )


def _group(group: Any) -> dict[str, Any]:
    fields = _mapping(group, "a parameter group")
    if not isinstance(fields.get("params"), list):
        raise CheckpointError("a parameter group in the checkpoint names no parameters")
    options = _mapping(decode(fields.get("options"), "a parameter group"), "a parameter group's options")
    return {"params": fields["params"], "options": options}


def _loss_scaler(state: Any) -> dict[str, float] | None:
    if state is None:
        return None
    fields = _mapping(state, "loss_scaler")
    if any(type(value) not in (int, float) for value in fields.values()):
        raise CheckpointError(f"the checkpoint's loss_scaler is {json.dumps(state)[:200]}, not numbers")
    return fields


def _optimizer(kind: Any) -> str | None:
    if kind is not None and type(kind) is not str:
        raise CheckpointError(f"the checkpoint's optimizer is a {type(kind).__name__}, not a name")
    return kind


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} in the checkpoint is a {type(value).__name__} instead of a dict")
    return value

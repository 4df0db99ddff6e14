"""A user's own ``torch.optim.Adam`` or ``AdamW``: what it says, and what it knows already, for the engine's optimizer.

    taken = groups_of(optimizer)
    config = {"optimizer": {"type": taken.type.value, "params": taken.defaults}}
    engine, hybrid = initialize_engine(lambda: model, 0, config, model_parameters=lambda _: taken.groups)
    move_state(optimizer, hybrid)

[Note: the user's optimizer] Both objects have the same groups from then on, so schedulers made for the user's go on
driving what is trained. But its ``step`` raises while there are gradients, since these are in chunks: whoever takes it
over returns the engine's optimizer in its place.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from patrickstar.config import OptimizerType, adam_options
from patrickstar.engine.optim import HybridAdam
from patrickstar.optimizer.state import REFUSED_OPTIONS, check_no_refused_option
from patrickstar.optimizer.uncorrected_adam import UncorrectedAdam, UncorrectedAdamW

logger = logging.getLogger("patrickstar")

_HOW_NOT_WHAT = ("foreach", "fused", "capturable", "decoupled_weight_decay", "bias_correction")
"""Keys of torch's groups that say how it computes, or that its class says."""
_TYPES = {
    torch.optim.Adam: OptimizerType.ADAM,
    torch.optim.AdamW: OptimizerType.ADAMW,
    UncorrectedAdam: OptimizerType.ADAM,
    UncorrectedAdamW: OptimizerType.ADAMW,
}


class TakenOver(NamedTuple):
    """What a user's optimizer says."""

    type: OptimizerType
    """Adam or AdamW, by the class of the user's optimizer."""
    groups: list[dict[str, Any]]
    """``params`` (the user's ``Parameter`` objects), ``lr``, ``betas``, ``eps``, ``weight_decay`` of each group, as
    they are now."""
    defaults: dict[str, Any]
    """The same options of a group that does not say them; and ``bias_correction``, where that is False."""


def groups_of(optimizer: torch.optim.Optimizer) -> TakenOver:
    """Reads ``optimizer``, which stays as it is, and says in the log that it is taken over.

    Raises:
        ValueError: it is neither ``torch.optim.Adam`` nor ``torch.optim.AdamW`` (subclasses may do anything, but for
            those of ``patrickstar.optimizer.uncorrected_adam``), or has an option that chunks cannot follow.
    """
    kind = _type_of(optimizer)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        check_no_refused_option(group, f"group {index} of the optimizer")
        options = adam_options(group, f"group {index} of the optimizer")
        groups.append({"params": list(group["params"]), **options})
    logger.debug(
        "%s is taken over with %d parameter groups: its updates are made in chunks from here on",
        type(optimizer).__name__,
        len(groups),
    )
    defaults = adam_options(optimizer.defaults, "the optimizer's default")
    if isinstance(optimizer, (UncorrectedAdam, UncorrectedAdamW)):
        defaults["bias_correction"] = False
    return TakenOver(kind, groups, defaults)


def move_state(optimizer: torch.optim.Optimizer, hybrid: HybridAdam) -> None:
    """Moves step counts, states and what schedulers keep in groups (``initial_lr``) into ``hybrid``, which was built
    from ``groups_of(optimizer)``; ``optimizer`` has no state and the groups of ``hybrid`` afterwards
    ([Note: the user's optimizer]).

    Raises:
        ValueError: the groups or the shapes of states are others; nothing is moved then.
    """
    indices = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    groups = [
        {
            **{key: value for key, value in group.items() if key not in (*REFUSED_OPTIONS, *_HOW_NOT_WHAT)},
            **adam_options(group, "a group of the optimizer"),
            "params": [indices[id(param)] for param in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    state = {indices[id(param)]: entry for param, entry in optimizer.state.items() if entry}
    sizes = [[len(group["params"]) for group in one.param_groups] for one in (optimizer, hybrid)]
    if state or sizes[0] != sizes[1]:
        hybrid.load_state_dict({"state": state, "param_groups": groups})
    else:  # nothing to write: states that were never made are zeros
        for own, group in zip(hybrid.param_groups, groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
    optimizer.state.clear()
    optimizer.param_groups = hybrid.param_groups


def _type_of(optimizer: torch.optim.Optimizer) -> OptimizerType:
    kind = _TYPES.get(type(optimizer))
    if kind is None:
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise ValueError(
            f"the optimizer is a {name}; PatrickStar updates as torch.optim.Adam and torch.optim.AdamW do: give one of "
            "these"
        )
    if kind is OptimizerType.ADAMW:
        return kind
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
    if len(decoupled) > 1:
        raise ValueError(
            "groups of the optimizer differ in decoupled_weight_decay; an engine has one kind of weight decay, give "
            "all groups the same"
        )
    return OptimizerType.ADAMW if decoupled == {True} else OptimizerType.ADAM

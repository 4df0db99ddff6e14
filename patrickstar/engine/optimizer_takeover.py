"""Takeover of a user's optimizer: its type, options and state move into the engine's optimizer.

Supported are ``torch.optim.AdamW``, ``Adam`` and ``SGD``, and ``patrickstar.optimizer.lion.Lion``:

    taken = groups_of(optimizer)
    config = {"optimizer": {"type": taken.type.value, "params": taken.defaults}}
    engine, hybrid = initialize_engine(lambda: model, 0, config, model_parameters=lambda _: taken.groups)
    move_state(optimizer, hybrid)
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, NamedTuple

import torch

from patrickstar.config import OptimizerType, group_options, nearest_optimizer
from patrickstar.engine.optim import HybridOptimizer
from patrickstar.optimizer.lion import Lion
from patrickstar.optimizer.state import REFUSED_OPTIONS, check_no_refused_option
from patrickstar.optimizer.uncorrected_adam import UncorrectedAdam, UncorrectedAdamW

logger = logging.getLogger("patrickstar")

_HOW_NOT_WHAT = ("foreach", "fused", "capturable", "decoupled_weight_decay", "bias_correction")
"""Keys of torch's groups that choose an implementation, or that the class implies."""
_TYPES = {
    torch.optim.Adam: OptimizerType.ADAM,
    torch.optim.AdamW: OptimizerType.ADAMW,
    UncorrectedAdam: OptimizerType.ADAM,
    UncorrectedAdamW: OptimizerType.ADAMW,
    Lion: OptimizerType.LION,
    torch.optim.SGD: OptimizerType.SGD,
}


class TakenOver(NamedTuple):
    """Type and options of a user's optimizer."""

    type: OptimizerType
    """From the class of the user's optimizer."""
    groups: list[dict[str, Any]]
    """``params`` (the user's ``Parameter`` objects), the present options of each group, and a scheduler's
    ``initial_lr``.
    """
    defaults: dict[str, Any]
    """Default options of a group, and ``bias_correction`` if it is False."""


def groups_of(optimizer: torch.optim.Optimizer) -> TakenOver:
    """Reads ``optimizer`` without changing it, and logs the takeover.

    Raises:
        ValueError: an unsupported class (subclasses may do anything), or an option that chunks cannot follow.
    """
    kind = _type_of(optimizer)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        check_no_refused_option(group, f"group {index} of the optimizer")
        options = group_options(kind, group, f"group {index} of the optimizer")
        schedule = {"initial_lr": group["initial_lr"]} if "initial_lr" in group else {}
        groups.append({"params": list(group["params"]), **options, **schedule})
    logger.debug(
        "%s is taken over with %d parameter groups: its updates are made in chunks from here on",
        type(optimizer).__name__,
        len(groups),
    )
    defaults = group_options(kind, optimizer.defaults, "the optimizer's default")
    if isinstance(optimizer, (UncorrectedAdam, UncorrectedAdamW)):
        defaults["bias_correction"] = False
    return TakenOver(kind, groups, defaults)


def move_state(optimizer: torch.optim.Optimizer, hybrid: HybridOptimizer) -> None:
    """Moves step counts, states and schedulers' entries in groups (``initial_lr``) into ``hybrid``.

    ``hybrid`` was built from ``groups_of(optimizer)``. Both objects share the groups and the hooks of steps afterwards,
    so schedulers made for the user's optimizer drive the engine's. A step of the engine's counts as one of the user's,
    so that schedulers warn about their order when it is wrong, and not otherwise. The user's ``optimizer`` keeps no
    state, and its ``step`` raises while gradients are pending in chunks. Callers return the engine's optimizer in its
    place.

    Raises:
        ValueError: groups or shapes of states differ; nothing is moved.
    """
    kind = _type_of(optimizer)
    indices = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    groups = [
        {
            **{key: value for key, value in group.items() if key not in (*REFUSED_OPTIONS, *_HOW_NOT_WHAT)},
            **group_options(kind, group, "a group of the optimizer"),
            "params": [indices[id(param)] for param in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    state = {indices[id(param)]: _known(entry) for param, entry in optimizer.state.items() if _known(entry)}
    sizes = [[len(group["params"]) for group in one.param_groups] for one in (optimizer, hybrid)]
    if state or sizes[0] != sizes[1]:
        hybrid.load_state_dict({"state": state, "param_groups": groups})
    else:  # missing states are zeros
        for own, group in zip(hybrid.param_groups, groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
    optimizer.state.clear()
    optimizer.param_groups = hybrid.param_groups
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks = getattr(optimizer, name)
        hooks.update(getattr(hybrid, name))
        setattr(hybrid, name, hooks)
    hybrid.register_step_post_hook(_StepsNoted(optimizer))


class _StepsNoted:
    """A hook that marks ``step`` of the user's optimizer as called, where ``torch.optim.lr_scheduler`` looks."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, *_: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._opt_called = True  # type: ignore[attr-defined]


def _known(entry: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state without None entries, which SGD sets for a missing momentum."""
    return {key: value for key, value in entry.items() if value is not None}


def _type_of(optimizer: torch.optim.Optimizer) -> OptimizerType:
    kind = _TYPES.get(type(optimizer))
    if kind is None:
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise ValueError(
            f"the optimizer is a {name}; PatrickStar updates as torch.optim.Adam, SGD and torch.optim.AdamW do, and as "
            f"patrickstar.optimizer.lion.Lion: give one of these ({nearest_optimizer(type(optimizer).__qualname__)})"
        )
    if kind is not OptimizerType.ADAM:
        return kind
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
    if len(decoupled) > 1:
        raise ValueError(
            "groups of the optimizer differ in decoupled_weight_decay; an engine has one kind of weight decay, give "
            "all groups the same"
        )
    return OptimizerType.ADAMW if decoupled == {True} else OptimizerType.ADAM

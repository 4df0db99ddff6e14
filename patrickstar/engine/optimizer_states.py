"""``optimizer.state`` of an open engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from patrickstar.config import OptimizerType, rule_of
from patrickstar.module.chunked_parameter import is_tied, whole_shape
from patrickstar.module.read_only_copy import ReadOnlyCopy
from patrickstar.optimizer.state import checked_entry
from patrickstar.session.session import Session

_REFUSAL = (
    "optimizer states are in PatrickStar's chunks, and optimizer.state has copies: they cannot be changed in place. "
    "Set a parameter's states by optimizer.state[param] = {...}, all by optimizer.load_state_dict, or one by "
    "patrickstar.utils.safe_set_full_optimizer_state(param, value, key)"
)


class _Copies(dict[str, Any]):
    """One parameter's states. Changes raise TypeError; copies and pickles are ordinary dictionaries."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{_REFUSAL}. Keep values of your own in a dictionary of your own")

    __setitem__ = __delitem__ = __ior__ = setdefault = update = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class OptimizerStates(MutableMapping[nn.Parameter, Mapping[str, Any]]):
    """The states of an engine's parameters, as ``torch.optim.Optimizer.state`` has them.

    Reads copy one parameter's states to the CPU: ``step`` and float32 tensors, or nothing before the first update. The
    copies refuse writes; assignments and deletions reach the chunks. With several ranks all must do the same. Empty
    when the engine is closed.
    """

    def __init__(self, session: Session, kind: OptimizerType, param_groups: list[dict[str, Any]]):
        self._session = session
        self._rule = rule_of(kind)
        self._param_groups = param_groups

    def __getitem__(self, param: nn.Parameter) -> Mapping[str, Any]:
        state = self._session.states.optimizer_state(param) if param in self else {}
        return _Copies(
            (key, ReadOnlyCopy.of(value, _REFUSAL) if isinstance(value, torch.Tensor) else value)
            for key, value in state.items()
        )

    def __setitem__(self, param: nn.Parameter, state: Mapping[str, Any]) -> None:
        self._session.check_open()
        others = [key for key in state if key not in ("step", *self._rule.states)]
        if others:
            raise ValueError(
                f"the given state has {others[0]!r}, which is none of {self._rule.classes}; keep values of your own in "
                "a dictionary of your own"
            )
        entry = checked_entry(state, whole_shape(param), "the given state", self._rule) if state else {}
        if not is_tied(param):
            self._session.states.set_optimizer_state(param, entry)

    def __delitem__(self, param: nn.Parameter) -> None:
        self[param] = {}

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter([param for group in self._param_groups for param in group["params"] if param in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        if self._session.runtime.closed or not isinstance(param, nn.Parameter) or is_tied(param):
            return False
        return self._session.states.has_optimizer_state(param)

    def clear(self) -> None:
        """Makes all states those of parameters that were never updated."""
        for param in list(self):
            del self[param]

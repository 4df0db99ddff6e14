"""Parameters as ordinary ones for a while, to be looked at or changed by code that knows nothing of chunks."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from patrickstar import _C
from patrickstar.chunked_parameter import ChunkedParameter, ParamHandle
from patrickstar.open_session import find_open_session
from patrickstar.session import Session


@contextlib.contextmanager
def GatheredParameters(  # noqa: N802 (DeepSpeed's name)
    params: nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None, enabled: bool = True
) -> Iterator[None]:
    """Inside, ``params`` are ordinary parameters of the compute dtype on the engine's device, whole on every rank.

    Args:
        params: one parameter, or several. Those that are not in chunks stay as they are.
        modifier_rank: the rank whose changes count; they go to all ranks when the block ends, into the float32 values,
            where elements changed. None: changes are dropped.
        enabled: False: nothing happens.

    With several ranks all enter and leave, with the same parameters. A parameter can be read without it, too: any torch
    function brings it in.
    """
    session = find_open_session()
    params = [params] if isinstance(params, nn.Parameter) else list(params)
    chunked = [param for param in dict.fromkeys(params) if isinstance(param, ChunkedParameter)]
    if not enabled or session is None or not chunked:
        yield
        return
    gathered = [_Gathered(session, param) for param in chunked]
    try:
        yield
    finally:
        changes = [item.change() if modifier_rank is not None else None for item in gathered]
        for item in gathered:
            item.give_back()
    if modifier_rank is not None:
        if modifier_rank not in session.ranks.members:
            raise ValueError(f"modifier_rank is {modifier_rank}; give one of ranks {list(session.ranks.members)}")
        for item, change in zip(gathered, _of_rank(session, changes, modifier_rank), strict=True):
            if change is not None:
                item.apply(change)


class _Gathered:
    """One parameter that is an ordinary one now."""

    def __init__(self, session: Session, param: ChunkedParameter):
        self._session = session
        self._param = param
        self._handle: ParamHandle = param._patrickstar
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._view = param.data
            dtype, device = self._view.dtype, self._view.device
            self._values = session.states.value(param).to(device=device, dtype=dtype)
        del param._patrickstar
        param.__class__ = nn.Parameter
        param.data = self._values.clone()

    def change(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Which elements changed, and their values; None when none did."""
        now = self._param.detach()
        differs = (now != self._values) & ~(now.isnan() & self._values.isnan())
        if not bool(differs.any()):
            return None
        return differs.cpu(), now[differs].float().cpu()

    def give_back(self) -> None:
        """The parameter is a view of its chunk again."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._param.data = self._view
        self._param.__class__ = ChunkedParameter
        self._param._patrickstar = self._handle

    def apply(self, change: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Puts changed elements into the float32 value."""
        differs, values = change
        with _C.HostAllocations():
            whole = self._session.states.value(self._param)
            whole[differs] = values
        self._session.states.set_value(self._param, whole)


def _of_rank(
    session: Session, changes: list[tuple[torch.Tensor, torch.Tensor] | None], rank: int
) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    if len(session.ranks.members) == 1:
        return changes
    mine = pickle.dumps(changes) if session.ranks.context.rank == rank else b""
    return pickle.loads(session.ranks.control.exchange(mine)[session.ranks.members.index(rank)])

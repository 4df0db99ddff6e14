"""Temporarily makes chunked parameters ordinary ones, for code that knows nothing of chunks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from patrickstar import _C
from patrickstar.checkpoint.plain_state import read_plain_state, write_plain_state
from patrickstar.module.chunked_parameter import ChunkedParameter, become_chunked, become_ordinary, become_tied, is_tied
from patrickstar.module.param_handle import ParamHandle
from patrickstar.ranks.messages import reading
from patrickstar.session.registry import find_session
from patrickstar.session.session import Session


@contextlib.contextmanager
def GatheredParameters(  # noqa: N802 (DeepSpeed's name)
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Context in which ``params`` are ordinary parameters of the compute dtype on the engine's device, whole on every
    rank.

    Args:
        params: one parameter, or several. Those that are not in chunks are unchanged.
        modifier_rank: the rank whose changes are kept. At the end changed elements go to all ranks' float32 values.
            None: changes are dropped.
        fwd_module: accepted and ignored.
        enabled: False: the context does nothing.

    With several ranks all must enter and leave, with the same parameters. Reading a parameter needs no such context:
    any torch function fetches it.

    Raises:
        ValueError: ``modifier_rank`` is no rank of the engine; or, at the end, a parameter has another shape or dtype,
            or was replaced in a module. Parameters are then restored, in chunks and with their former values.
    """
    params = [params] if isinstance(params, nn.Parameter) else list(params)
    by_session: dict[Session, list[ChunkedParameter]] = {}
    for param in dict.fromkeys(params):
        session = find_session(param) if enabled and isinstance(param, ChunkedParameter) else None
        if session is not None:
            by_session.setdefault(session, []).append(param)
    with contextlib.ExitStack() as gathered:
        for session, chunked in by_session.items():
            gathered.enter_context(_gathered_of(session, chunked, modifier_rank))
        yield


@contextlib.contextmanager
def _gathered_of(session: Session, chunked: list[ChunkedParameter], modifier_rank: int | None) -> Iterator[None]:
    if modifier_rank is not None and modifier_rank not in session.ranks.members:
        raise ValueError(f"modifier_rank is {modifier_rank}; give one of ranks {list(session.ranks.members)}")
    divided = session.matrices.names is not None or any(param._patrickstar.part is not None for param in chunked)
    if modifier_rank is not None and divided:
        raise _C.StateError(
            "with tensor_parallel and expert_parallel each rank has another part of a parameter, so one rank's changes "
            "cannot be those of all; leave modifier_rank out, or load whole values by engine.load_state_dict"
        )
    places = _places(session.module)
    gathered: list[_Gathered] = []
    changes: list[_Change | None] = []
    with contextlib.ExitStack() as held:
        for param in chunked:
            gathered.append(_Gathered(session, param, places.get(param, [])))
            held.callback(gathered[-1].give_back)
        yield
        for item in gathered:
            item.check_places()
        if modifier_rank is not None and modifier_rank == session.ranks.context.rank:
            changes = [item.change() for item in gathered]
    if modifier_rank is not None:
        for item, change in zip(gathered, _of_rank(session, gathered, changes, modifier_rank), strict=True):
            if change is not None:
                item.apply(change)


_Change = tuple[torch.Tensor, torch.Tensor]
"""A mask of changed elements, and their values."""


_Place = tuple[nn.Module, str]


def _places(root: nn.Module) -> dict[nn.Parameter, list[_Place]]:
    """Modules and names under which each parameter is registered."""
    places: dict[nn.Parameter, list[_Place]] = {}
    for module in root.modules():
        for name, param in module._parameters.items():
            if param is not None:
                places.setdefault(param, []).append((module, name))
    return places


class _Gathered:
    """One parameter that is temporarily an ordinary one."""

    def __init__(self, session: Session, param: ChunkedParameter, places: list[_Place]):
        self._session = session
        self._param = param
        self._places = places
        self._handle: ParamHandle = param._patrickstar
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._view = param.data
            dtype, device = self._view.dtype, self._view.device
            self._values = session.states.value(param).to(device=device, dtype=dtype)
        self._handle.uses.note_read([self._handle.id])
        self._is_tied = is_tied(param)
        become_ordinary(param, self._values.clone())

    def change(self) -> _Change | None:
        """The mask of elements that the user has changed, and their new values in float32, both on the CPU; None if
        there are none.
        """
        now = self._param.detach()
        if now.shape != self._values.shape or now.dtype != self._values.dtype:
            raise ValueError(
                f"{self._handle.name} had shape {tuple(self._values.shape)} and dtype {self._values.dtype} before "
                f"GatheredParameters, and has {tuple(now.shape)} and {now.dtype} at its end; change values in place"
            )
        differs = (now != self._values) & ~(now.isnan() & self._values.isnan())
        if not bool(differs.any()):
            return None
        return differs.cpu(), now[differs].float().cpu()

    def check(self, change: _Change | None) -> None:
        """Raises ValueError if ``change`` does not fit this parameter."""
        if change is not None:
            differs, values = change
            if differs.dtype != torch.bool or differs.shape != self._values.shape or values.dtype != torch.float32:
                raise ValueError(f"{differs.dtype} {tuple(differs.shape)} and {values.dtype} for {self._handle.name}")
            if values.shape != (int(differs.sum()),):
                raise ValueError(f"{tuple(values.shape)} values for {int(differs.sum())} elements")

    def check_places(self) -> None:
        """Raises ValueError if a module has another parameter under the same name."""
        if any(module._parameters.get(name) is not self._param for module, name in self._places):
            raise ValueError(
                f"{self._handle.name} was replaced by another parameter within GatheredParameters, which the engine "
                "does not have; change values in place (param.copy_), or replace it before the engine is built"
            )

    def give_back(self) -> None:
        """Makes the parameter a view of its chunk again, under its former names."""
        for module, name in self._places:
            module._parameters[name] = self._param
        (become_tied if self._is_tied else become_chunked)(self._param, self._view, self._handle)

    def apply(self, change: _Change) -> None:
        """Writes changed elements to the float32 value."""
        differs, values = change
        with _C.HostAllocations():
            masters = self._session.states.value(self._param)
            whole = masters.to(self._values.dtype).float()
            whole[differs] = values
        self._session.observer.replace_values(self._handle, masters, whole)


def _of_rank(
    session: Session, gathered: list[_Gathered], changes: list[_Change | None], rank: int
) -> list[_Change | None]:
    if len(session.ranks.members) == 1:
        return changes
    message = io.BytesIO()
    if session.ranks.context.rank == rank:
        write_plain_state(message, changes, "changed parameters")
    with session.guard("GatheredParameters"):
        received = session.ranks.control.exchange(message.getvalue(), "changed parameters")
    with reading("changed parameters"):
        changes = read_plain_state(io.BytesIO(received[session.ranks.members.index(rank)]), "the message")
        for item, change in zip(gathered, changes, strict=True):
            item.check(change)
    return changes

"""Loan of a device's memory to others between two calls of an engine: to a generator, or to another process.

    lend(session, keep=0)
    ...  # others use the device
    take_back(session)

Chunks leave for the host, PyTorch's cache for the device, and the engine's limit on PyTorch's allocator is lifted.
Values and optimizer states keep their bits, and gradients that wait for a step stay. Saving and export go on from the
host; forwards, backwards and steps are refused. Parameters and buffers outside of chunks stay on the device.
"""

from __future__ import annotations

import gc

import torch

from patrickstar import _C
from patrickstar.session.device_loan import Holder
from patrickstar.session.interrupts import deferred_signals
from patrickstar.session.session import Session
from patrickstar.sizes import enough_size, parse_size, show_size


def lend(session: Session, keep: int | str) -> None:
    """Moves chunks to the host until at most ``keep`` bytes, or a size such as ``"4GiB"``, are on the device.

    Parameters leave first, optimizer states last. Collective over all ranks.

    Raises:
        MemoryBudgetError: host memory has no room; nothing is lent.
        StateError: the memory is lent, or a forward, a backward or a step is not over.
        ValueError: ``keep`` is no size.
    """
    keep_bytes = parse_size(keep) if isinstance(keep, str) else keep
    if keep_bytes is None or keep_bytes < 0:
        raise ValueError(f'lend: keep is {keep!r}; give bytes, or a size such as "4GiB"')
    session.check_open()
    session.loan.check()
    with deferred_signals(), session.guard("lend"):
        session.ranks.meet()
        gc.collect()  # autograd graphs in cycles hold activations
        left = session.runtime.lend_device(keep_bytes)
        session.loan.room_bytes = _room_bytes(session)
        refusal = _of_any_rank(session, "" if left <= keep_bytes else _too_many_stay(session, left, keep_bytes))
        if refusal:
            session.runtime.take_device_back()
            session.runtime.return_states()
        else:
            session.loan.holder = Holder.OTHERS
    if refusal:
        raise _C.MemoryBudgetError(refusal)


def take_back(session: Session) -> None:
    """Ends the loan. Optimizer states return to the device now, parameters as they are used. Collective over all ranks.

    Raises:
        MemoryBudgetError: others hold device memory that the engine had. The loan is over, and states return later.
        StateError: nothing is lent.
    """
    session.check_open()
    if session.loan.holder is Holder.ENGINE:
        raise _C.StateError("the engine's device memory is not lent; call lend() first")
    with deferred_signals(), session.guard("take_back"):
        session.ranks.meet()
        session.loan.holder = Holder.ENGINE
        refusal = _of_any_rank(session, _what_others_hold(session))  # first, since it empties PyTorch's cache
        session.runtime.take_device_back()
        if not refusal:
            session.runtime.return_states()
    if refusal:
        raise _C.MemoryBudgetError(refusal)


def _of_any_rank(session: Session, refusal: str) -> str:
    """The first rank's refusal, the same on all ranks; empty: none refuses."""
    if len(session.ranks.members) == 1:
        return refusal
    said = session.ranks.control.exchange(refusal.encode(), "a loan of device memory")
    return next((f"rank {rank}: {text.decode()}" for rank, text in enumerate(said) if text), "")


def _too_many_stay(session: Session, left: int, keep_bytes: int) -> str:
    host = session.runtime.report()["host_budget_bytes"]
    return (
        f"lend: {show_size(left)} of chunks must stay on the device and keep is {show_size(keep_bytes)}, since the "
        f"other chunks fill host_memory of {show_size(host)}; raise host_memory to "
        f"{enough_size(host + left - keep_bytes)}, or give keep={left}"
    )


def _what_others_hold(session: Session) -> str:
    """A refusal if the device has less room than before the loan; empty: it has enough."""
    before = session.loan.room_bytes
    enough = before - _C.CUDA_SLACK_RATIO * before
    if _room_bytes(session) >= enough:
        return ""
    gc.collect()  # what others have dropped may be in cycles
    room = _room_bytes(session)
    if room >= enough:
        return ""
    return (
        f"after a loan the device has room for {show_size(room)} of chunks and activations, before it for "
        f"{show_size(before)}; free the {show_size(before - room)} that others hold before training goes on: delete "
        "tensors and call torch.cuda.empty_cache(), or let the generator sleep"
    )


def _room_bytes(session: Session) -> int:
    """Bytes that chunks and activations may take; 0 on the simulated device."""
    device = session.device
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    budget = session.runtime.report()["device_budget_bytes"]
    return min(int(budget), free + torch.cuda.memory_reserved(device)) - torch.cuda.memory_allocated(device)

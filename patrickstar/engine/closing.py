"""Whether host memory holds a module's own parameters when its engine closes.

[Note: room to close] An engine's values lie on the device and the host together, in 16 bits and fewer bytes than a
module has: one of 30 B parameters in float32 takes 114 GiB of the host alone when it is whole again. Where that does
not fit, the system would end the process on the way. So it is asked before anything is changed, by all ranks, and
chunks whose states are on the host are given back first, which makes room for the others' values.
"""

from __future__ import annotations

from patrickstar import _C
from patrickstar.engine.rank_sync import failed_ranks
from patrickstar.machine.host_memory import available_bytes
from patrickstar.module.adoption import AdoptedParams
from patrickstar.ranks.distributed import RankGroups
from patrickstar.sizes import show_size

_RESERVE_BYTES = 2**30  # for what a process takes meanwhile


def lack_of_room_to_close(params: AdoptedParams | None, held_bytes: int, ranks: RankGroups) -> str:
    """Why the module cannot be whole again; empty if it can. All ranks must ask.

    Args:
        params: what would be given back; None: nothing was taken.
        held_bytes: of the host, which this rank's chunks have and would free.
        ranks: those that close together; each makes its module whole.
    """
    num_here = ranks.context.local_world_size
    needed = num_here * params.host_bytes_when_released() if params is not None else 0
    room = max(available_bytes() - _RESERVE_BYTES, 0) + held_bytes * num_here
    failure = _C.MemoryBudgetError(_text(needed, room)) if needed > room else None
    failed = failed_ranks(ranks, failure)
    return str(failure) if failure is not None else failed


def _text(needed: int, room: int) -> str:
    return (
        f"the module's own parameters take {show_size(needed)} of host memory when the engine closes, which has "
        f"{show_size(room)} for them once chunks are freed; nothing was changed: save or export what is wanted and "
        "call engine.discard(), which frees all without making the module whole, or build the module in 16 bits"
    )

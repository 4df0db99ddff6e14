"""The phases of a resize, in their order, and what a process learns at its end."""

from __future__ import annotations

import dataclasses
import enum


class Phase(enum.Enum):
    """What a process does in a resize. Until the end of :attr:`DECIDE` old ranks have all they had, and a failure of a
    process that joins leaves them as they are; from :attr:`CLOSE` on a failure ends all ranks, with an error.
    """

    GATHER = "old ranks agree on the resize and wait for processes that join; these have arrived"
    PUBLISH = "old ranks write what others need of their shards; who joins waits for an invitation"
    CHECK = "whoever needs shards of others looks whether they are there, and fetches those of other hosts"
    DECIDE = "the leader decides"
    CLOSE = "old ranks set aside what they keep, and close their core and their groups"
    OPEN = "new ranks open their groups"
    BUILD = "new ranks build their shards of what they kept and what others published"
    CONFIRM = "new ranks tell each other that they are complete"


class Membership(enum.Enum):
    """What this process is after a resize."""

    RANK = "one of the ranks"
    LEFT = "none of them: its engine is closed, the module's parameters have no elements, and the script may end"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resized:
    """How a resize ended for this process."""

    membership: Membership
    rank: int
    """The rank from now on; -1 for a process that has left."""
    num_ranks: int
    """Ranks from now on."""
    received_bytes: int
    """Of shards that came from other processes."""
    total_bytes: int
    """Of all shards that travelled, over all ranks."""

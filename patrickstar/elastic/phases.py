"""The phases of a resize, in order, and the results of resizes, recoveries and steps for a
process.
"""

from __future__ import annotations

import dataclasses
import enum


class ResizePhase(enum.Enum):
    """Phases of a resize. Until the end of :attr:`DECIDE` old ranks keep all their data, and a failure of a joining
    process leaves them unchanged. From :attr:`CLOSE` on a failure ends all ranks, with an error.
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
    """Membership of this process after a resize."""

    RANK = "one of the ranks"
    LEFT = "none of them: its engine is closed, the module's parameters have no elements, and the script may end"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resized:
    """The result of a resize for this process."""

    membership: Membership
    rank: int
    """The new rank; -1 for a process that has left."""
    num_ranks: int
    """The new number of ranks."""
    received_bytes: int
    """Bytes of shards received from other processes."""
    total_bytes: int
    """Bytes of all transferred shards, over all ranks."""


class RecoverySource(enum.Enum):
    """Where the values of the ranks that are left come from."""

    COPIES = "copies of the last step that all ranks had made"
    CHECKPOINT = "none yet: a checkpoint must be loaded"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovered:
    """The result of a recovery for this process."""

    resized: Resized
    source: RecoverySource
    num_lost: int
    """Ranks that were lost."""


class Next(enum.Enum):
    """Instructions to the script after a step."""

    TRAIN = "the next step"
    LEAVE = "it ends: this process is no rank any more, its engine is closed"
    STOP = "it ends: the run was ordered to; a checkpoint was saved where one is kept"

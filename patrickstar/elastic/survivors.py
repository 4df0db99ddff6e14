"""Agreement of the processes that are left when ranks are lost, through the rendezvous' store.

    call = RollCall(meeting, "a unique name", timeout_seconds=600)      # with call.beating(): as long as the run
    verdict = call.hold(1, report)                       # all living processes of the run, with the same number
    told = call.exchange("plan", "...")                  # those of the verdict

Vocabulary:
  world        a set of ranks between two changes; a later one has a greater number.
  generation   the copies that all ranks of a world have made at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from patrickstar import _C
from patrickstar.elastic.rendezvous import Rendezvous, ResizeError
from patrickstar.ranks.messages import reading

_PREFIX = "patrickstar/survivors"
_BEAT_SECONDS = 0.5


class LeftBehindError(_C.RankFailure):
    """The other ranks go on without this one."""


@dataclasses.dataclass(frozen=True, order=True)
class Generation:
    """Names copies."""

    world: int
    number: int
    """Counts the copies of this world. Two may be of one step: one before a change of the batch, one after it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Copies that a living process has."""

    host: str
    worlds: Mapping[int, tuple[str, ...]]
    """Names of processes by rank, for each world that this process knows."""
    own: tuple[Generation, ...]
    """Generations of which it has its own shards."""
    mirrored: tuple[Generation, ...]
    """Generations of which it has the shards of the rank before it."""

    def to_json(self) -> str:
        """The report as text."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Report:
        """The inverse of :meth:`to_json`."""
        with reading("what a rank has"):
            said = json.loads(text)
            return Report(
                host=said["host"],
                worlds={int(world): tuple(names) for world, names in said["worlds"].items()},
                own=tuple(Generation(**one) for one in said["own"]),
                mirrored=tuple(Generation(**one) for one in said["mirrored"]),
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The ranks that go on after a loss, and the copies from which they do."""

    world: tuple[str, ...]
    """Names by old rank."""
    survivors: tuple[str, ...]
    """Names in the order of their old ranks."""
    generation: Generation | None
    """The copies; None: some shards are lost."""
    hosts: tuple[str, ...]
    """Hosts of the survivors."""

    @property
    def lost(self) -> list[int]:
        """Old ranks that do not go on."""
        return [rank for rank, name in enumerate(self.world) if name not in self.survivors]

    def holder(self, old: int) -> str:
        """The process that has the shards of an old rank."""
        name = self.world[old]
        return name if name in self.survivors else self.world[(old + 1) % len(self.world)]


def judge(reports: Mapping[str, Report]) -> Verdict:
    """The verdict from the reports of all living processes, by name. A pure function.

    The newest generation counts of which each rank's shards are with the rank or with the next one. Without one,
    the ranks of the newest world go on.
    """
    worlds = {world: names for report in reports.values() for world, names in report.worlds.items()}
    generations = {one for report in reports.values() for one in report.own if one.world in worlds}
    for generation in sorted(generations, reverse=True):
        names = worlds[generation.world]
        own = [name in reports and generation in reports[name].own for name in names]
        mirrors = [has and generation in reports[name].mirrored for name, has in zip(names, own, strict=True)]
        if all(here or mirrored for here, mirrored in zip(own, mirrors[1:] + mirrors[:1], strict=True)):
            return _verdict(names, [name for name, has in zip(names, own, strict=True) if has], generation, reports)
    names = worlds[max(worlds)] if worlds else ()
    return _verdict(names, [name for name in names if name in reports], None, reports)


def _verdict(
    world: tuple[str, ...], survivors: list[str], generation: Generation | None, reports: Mapping[str, Report]
) -> Verdict:
    hosts = tuple(reports[name].host for name in survivors)
    return Verdict(world=world, survivors=tuple(survivors), generation=generation, hosts=hosts)


class RollCall:
    """One process's part in the agreement; for one thread.

    Args:
        meeting: the run's rendezvous.
        name: of this process, unique in the run.
        timeout_seconds: for a process that lives and does not answer.
    """

    def __init__(self, meeting: Rendezvous, name: str, timeout_seconds: float):
        self.name = name
        self._meeting, self._timeout_seconds = meeting, timeout_seconds
        self._number = 0
        self._survivors: tuple[str, ...] = ()

    def beating(self) -> contextlib.AbstractContextManager[None]:
        """Context in which this process counts as living."""
        return self._meeting.beating(self.name, _BEAT_SECONDS)

    def hold(self, number: int, report: Report) -> Verdict:
        """Waits for the reports of all processes that live, and returns the same verdict on all of them.

        Args:
            number: of the roll call, the same on all processes; unused so far.
            report: of this process.

        Raises:
            LeftBehindError: the others go on without this process.
            RankFailure: the store is gone, or a living process does not come.
        """
        self._number = number
        reports, asked = {self.name: report}, {self.name}
        try:
            self._meeting.store.set(self._key("here", self.name), report.to_json())
            while others := {name for one in reports.values() for some in one.worlds.values() for name in some} - asked:
                keys = {name: self._key("here", name) for name in others}
                for name in self._meeting.await_any(keys, self._timeout_seconds):
                    reports[name] = Report.from_json(self._meeting.store.get(keys[name]).decode())
                asked |= others
        except (ResizeError, dist.DistError) as error:
            raise _C.RankFailure(f"the ranks that are left did not find each other: {error}") from error
        verdict = self._settle(judge(reports))
        if self.name not in verdict.survivors:
            raise LeftBehindError("the other ranks go on without this one: it has no shards of theirs, or came late")
        self._survivors = verdict.survivors
        return verdict

    def _settle(self, mine: Verdict) -> Verdict:
        text = json.dumps(dataclasses.asdict(mine))
        first = self._meeting.store.compare_set(self._key("verdict", ""), "", text)
        with reading("a verdict"):
            said: dict[str, Any] = json.loads(first)
            generation = said.pop("generation")
            lists = {key: tuple(value) for key, value in said.items()}
            return Verdict(**lists, generation=None if generation is None else Generation(**generation))

    def exchange(self, what: str, mine: str) -> list[str]:
        """Texts of all survivors, in their order.

        Raises:
            RankFailure: one is gone.
        """
        self._meeting.store.set(self._key(what, self.name), mine)
        try:
            return [
                self._meeting.await_key(
                    self._key(what, name),
                    beating=name,
                    timeout_seconds=self._timeout_seconds,
                    whom=f"rank {rank} of those that are left",
                )
                for rank, name in enumerate(self._survivors)
            ]
        except ResizeError as error:
            raise _C.RankFailure(f"another rank was lost meanwhile: {error}") from error

    def _key(self, what: str, name: str) -> str:
        return f"{_PREFIX}/{self._number}/{what}/{name}"

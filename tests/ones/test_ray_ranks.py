import types

import pytest

from patrickstar.elastic.orders import OutcomeKind
from patrickstar.ones.cluster.fleet import Phase
from patrickstar.ones.cluster.ray_ranks import JobProcesses


class Ranks:
    def __init__(self, *actors: str):
        self.actors = list(actors)

    def drop(self, actor: str) -> None:
        self.actors.remove(actor)


def processes_of(trains: Ranks, joins: Ranks, ended: set[str], outcomes: list) -> JobProcesses:
    processes = object.__new__(JobProcesses)
    processes._groups, processes._joining = [trains], joins
    processes._number, processes._num_ranks, processes._ordered_ranks = 1, 1, 2
    processes._stops, processes._resize_s, processes._refusal, processes._failure = False, 0.0, "", ""
    processes._orders = types.SimpleNamespace(outcome=lambda number: outcomes.pop(0), report=lambda: None)

    def note_exit(group, actor):
        if actor in ended:
            group.drop(actor)

    processes._note_exit = note_exit
    return processes


def test_a_run_that_ends_before_others_have_joined_is_over():
    joins = Ranks("joins")
    processes = processes_of(Ranks("trains"), joins, {"trains"}, [None, None])
    assert processes.status().phase is Phase.ENDED
    assert joins.actors == []


@pytest.mark.parametrize("outcomes", [["resized"], [None, "resized"]], ids=["before the end", "with the end"])
def test_those_that_have_joined_go_on_when_the_others_end(outcomes):
    resized = types.SimpleNamespace(kind=OutcomeKind.DONE, seconds=1.0, reason="")
    joins = Ranks("joins")
    found = [resized if one else None for one in outcomes]
    processes = processes_of(Ranks("trains"), joins, {"trains"}, found)
    processes.status()
    assert joins.actors == ["joins"]
    assert processes._groups == [joins]

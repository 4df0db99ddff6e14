"""What ranks make of their votes on the next plan: the slowest of all."""

from __future__ import annotations

import pytest

from patrickstar import _C

NEVER, AT_RETIRE = _C.Recipe.NEVER, _C.Recipe.HOST_AHEAD
AFTER_NORM, ON_DEVICE = _C.Recipe.HOST, _C.Recipe.DEVICE
LOWER_IS_SLOWER = ("upload_gbps", "download_gbps", "host_adam_params_per_second", "device_adam_params_per_second",
                   "launch_ahead_seconds")  # fmt: skip
HIGHER_COUNTS = ("transfer_latency_seconds", "collective_latency_seconds", "synchronize_seconds", "gather_gbps",
                 "scatter_gbps", "param_pass", "states_pass")  # fmt: skip


def vote(rate=None, seconds=(), updates=(), **flags):
    rates = None
    if rate is not None:
        rates = _C.Rates()
        for name in (*LOWER_IS_SLOWER, *HIGHER_COUNTS):
            setattr(rates, name, rate)
    return {"can_measure": True, "has_plan": True, "updates": list(updates),
            "rates": rates, "compute_seconds": list(seconds), "activations": [], **flags}  # fmt: skip


def test_one_rank_agrees_with_itself():
    mine = vote(3.0, [1.0, 2.0], [NEVER, AT_RETIRE])
    found = _C.agreed_vote([mine])
    assert {name: found[name] for name in found if name != "rates"} == {n: mine[n] for n in mine if n != "rates"}
    assert all(getattr(found["rates"], name) == 3.0 for name in (*LOWER_IS_SLOWER, *HIGHER_COUNTS))


def test_the_slowest_rank_counts():
    """By moment and rate; but what a rank waits for in collectives is another's lateness: there the fastest counts."""
    found = _C.agreed_vote([vote(2.0, [1.0, 5.0]), vote(4.0, [2.0, 3.0]), vote(3.0, [0.5, 4.0])])
    assert found["compute_seconds"] == [2.0, 5.0]
    assert all(getattr(found["rates"], name) == 2.0 for name in LOWER_IS_SLOWER)
    assert all(getattr(found["rates"], name) == 4.0 for name in HIGHER_COUNTS)


def test_the_rank_counts_whose_activations_leave():
    """By moment and direction, whether others have any that leave or none."""
    votes = [
        vote(1.0, [1.0, 1.0], activations=activations)
        for activations in ([[8, 0, 0], [0, 8, 4]], [], [[2, 0, 0], [0, 9, 9]])
    ]
    for order in (votes, votes[::-1], [votes[1], votes[0], votes[2]]):
        assert _C.agreed_vote(order)["activations"] == [[8, 0, 0], [0, 9, 9]]
    assert _C.agreed_vote([votes[1], votes[1]])["activations"] == []
    with pytest.raises(_C.StateError, match="activations of other moments"):
        _C.agreed_vote([vote(1.0, [1.0], activations=[[1, 1, 1]] * 2)])


def test_an_update_that_is_late_on_any_rank_is_late():
    late = [NEVER, AT_RETIRE, AFTER_NORM, ON_DEVICE]
    found = _C.agreed_vote([vote(updates=[NEVER, AT_RETIRE, AT_RETIRE, AFTER_NORM]), vote(updates=late)])
    assert found["updates"] == late


@pytest.mark.parametrize("flag", ["can_measure", "has_plan"])
def test_what_holds_for_all(flag):
    assert _C.agreed_vote([vote(), vote()])[flag]
    assert not _C.agreed_vote([vote(), vote(**{flag: False})])[flag]


def test_times_wait_for_all_ranks():
    assert _C.agreed_vote([vote(1.0, [1.0]), vote()])["rates"] is None
    assert _C.agreed_vote([vote(), vote(1.0, [1.0])])["rates"] is None
    assert _C.agreed_vote([vote(1.0, [1.0]), vote(1.0, [1.0, 2.0])])["rates"] is None

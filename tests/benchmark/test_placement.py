import pytest

from benchmark import placed_jobs, placement
from benchmark.placed_jobs import Job
from benchmark.placement import Search

AMPLE = Job("tiny", 2, 0.2, 0.3, chunk_numel=2**18)
SCARCE_HOST = Job("tiny", 2, 0.2, 0.13, chunk_numel=2**18)


@pytest.fixture(autouse=True)
def jobs(monkeypatch):
    monkeypatch.setattr(placed_jobs, "JOBS", {"ample": AMPLE, "scarce": SCARCE_HOST})
    monkeypatch.setattr(placement, "JOBS", placed_jobs.JOBS)


def test_a_placement_like_the_heuristics_one_has_its_step():
    search = Search(AMPLE)
    own = search.own()
    by_count = {found.count: found for found in search.candidates("first", range(search.num_chunks + 1))}
    same = by_count[own.count]
    assert (same.seconds, same.state_bytes) == (own.seconds, own.state_bytes)
    assert search.slow_seconds(same) == search.slow_seconds(own) > own.seconds


def test_placements_that_the_budgets_do_not_hold_are_left_out():
    for order in ("first", "last", "spread"):
        search = Search(SCARCE_HOST)
        counts = [found.count for found in search.candidates(order, range(search.num_chunks + 1))]
        assert counts and 0 not in counts and search.num_chunks not in counts


def test_a_row_names_the_best_and_what_it_gains():
    row = placement.measure("ample", stride=1)
    assert row["fits"].seconds == min(found.seconds for found in row["found"])
    assert row["fits"].seconds <= row["kept"].seconds <= row["own"].seconds
    assert row["slow_gain"] >= 1 / 1.005
    text = placement.format_table({"rows": [row], "sweeps": [placement.sweep("ample", "device", 3)]})
    print(text)
    assert f"{row['own'].seconds / row['kept'].seconds:.3f} x" in text


def test_orders_have_as_many_chunks_as_they_say():
    assert placement.chosen_chunks("first", 2, 5) == [0, 1]
    assert placement.chosen_chunks("last", 2, 5) == [4, 3]
    assert placement.chosen_chunks("spread", 2, 5) == [0, 2]
    assert placement.chosen_chunks("spread", 5, 5) == [0, 1, 2, 3, 4]


def test_of_careful_choices_the_shortest_step_of_those_alike_on_a_slower_machine():
    short, steady, alike = (1.0, 2.0, "short"), (1.2, 1.5, "steady"), (1.1, 1.507, "alike")
    assert placement.carefully([short, steady, alike]) == alike


def test_a_rise_is_what_a_step_takes_longer_with_more_memory():
    assert placement.rise([(1, 2.0), (2, 1.0), (3, 1.1), (4, 1.004)]) == (pytest.approx(0.1), 3, 1)
    assert placement.rise([(1, 2.0), (2, 1.0)])[0] == 0

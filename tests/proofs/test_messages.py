"""Cases of proofs/messages.py: they hold, and each finds what is left out of a message's tag."""

import itertools

import pytest

from proofs import messages
from proofs.cases import Setting
from proofs.flips import PROOF

POINTS = 60


def complaints(case, tmp_path):
    setting = Setting(tmp_path, 0, lambda what: None, lambda count: None)
    points = case.points(setting)
    found = list(itertools.islice(points, POINTS))
    points.close()
    assert len(found) == POINTS
    return [each for each in found if each is not None]


@pytest.mark.parametrize("case", messages.CASES, ids=lambda case: case.name)
def test_only_the_next_message_of_the_other_side_is_taken(case, tmp_path):
    assert complaints(case, tmp_path) == []


@pytest.mark.parametrize("planted", [*messages.planted()], ids=lambda planted: planted.name)
def test_parts_that_a_tag_leaves_out_are_found(planted, tmp_path):
    with planted.bug():
        assert complaints(PROOF.case(planted.case), tmp_path)
    assert complaints(PROOF.case(planted.case), tmp_path) == []

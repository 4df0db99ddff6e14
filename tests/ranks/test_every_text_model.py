"""All causal and masked language models of transformers. The commit selects the models of a run; the others are
slow.
"""

import datetime
import re
import subprocess

import pytest
import transformers

from tests.distributed import ROOT, run_ranks
from tests.models import Case
from tests.ranks.every_text_model import batches, try_all
from tests.text_models import NOT_TRAINED, build, text_models
from tests.training import assert_same, least_device_memory, make_config, relative_error, train, train_plain

NUM_SLICES = 57
STEPS = 3


def number_of_this_run() -> int:
    """From the commit, so that a run can be repeated; from the day without git."""
    told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return int(told.strip() or "0", 16) or datetime.date.today().toordinal()


def refused_in_the_guide() -> set[str]:
    page = (ROOT / "docs" / "refused_models.md").read_text()
    return set(re.findall(r"`(\w+)`", page[: page.index("Not tried")].partition("|---|---|")[2]))


def on_a_mesh_in_the_guide() -> set[str]:
    page = (ROOT / "docs" / "guides" / "tensor_parallel.md").read_text()
    return set(page.partition("### Classes")[2].partition("```text\n")[2].partition("```")[0].split())


def slices(mark_others):
    of_this_run = number_of_this_run() % NUM_SLICES
    return [pytest.param(i, marks=() if i == of_this_run else mark_others) for i in range(NUM_SLICES)]


@pytest.mark.parametrize("index", slices(pytest.mark.slow))
def test_right_or_refused_by_name(index):
    names = text_models()[index::NUM_SLICES]
    print(transformers.__version__, names)
    refused = refused_in_the_guide()
    ways = {
        "sequences": ({"sequence_parallel": {"size": 2}}, {name for name in names if name not in refused}),
        "a mesh": ({"tensor_parallel": {"rows": 1, "columns": 2}}, on_a_mesh_in_the_guide()),
    }
    found = run_ranks(2, try_all, names, [options for options, _ in ways.values()], timeout_seconds=600)
    for way, (_, right) in ways.items():
        for rank in found:
            outcomes = dict(zip(names, rank[list(ways).index(way)], strict=True))
            for name, outcome in outcomes.items():
                expected = "right" if name in right else "refused: "
                assert outcome.startswith(expected), f"{name} with {way}: {outcome}"
                assert outcome == "right" or re.sub(r"For.*|LM.*|With.*", "", name) in outcome, outcome


@pytest.mark.parametrize("index", slices(pytest.mark.slow))
def test_one_rank_within_any_budget(index):
    for name in sorted({*text_models()[index::NUM_SLICES]} - {*NOT_TRAINED}):
        (inputs, *_) = batches()
        case = Case(lambda name=name: build(name), lambda generator, inputs=inputs: dict(inputs))
        config = make_config("fp32", default_chunk_size=4096)
        ample, plain = train(case, config, steps=STEPS), train_plain(case, steps=STEPS)
        error = relative_error(ample, plain)
        least = least_device_memory(case, config, steps=STEPS)
        print(name, f"{error:.1e}", least)
        assert error < 1e-5, name
        assert_same(train(case, {**config, "device_memory": least}, steps=STEPS), ample)

"""Ranks are killed in a run, and the others go on without them: the same samples, and losses of plain PyTorch."""

import itertools
import json
import signal

import pytest
import torch
from torch import nn

from patrickstar.elastic import Next, Orders, ResizePhase, serve_rendezvous
from patrickstar.elastic.sampler import ElasticSampler
from patrickstar.elastic.survivors import Generation, Report, judge
from tests.bits import assert_same_bits
from tests.distributed import free_port, rank_outcomes
from tests.elastic.batch_runs import follow, replay
from tests.elastic.runs import GLOBAL_BATCH, NUM_SAMPLES, build, samples
from tests.elastic.survivor_runs import Point, survive, survive_across_nodes, survive_in_another_script
from tests.elastic.test_batch_changes import check_against_replay
from tests.elastic.test_resize import ALONE
from tests.nodes import two_nodes
from tests.training import ADAM

NUM_STEPS = 4


def survive_with(options, *arguments):
    return survive(*arguments, **options)


def survive_across_nodes_with(options, *arguments):
    return survive_across_nodes(*arguments, **options)


def outcomes_of(num_first, kills, log, *, num_joining=0, num_steps=NUM_STEPS, **options):
    """Outcomes of ``num_first`` ranks, and of processes that join them."""
    log.mkdir()
    store = serve_rendezvous("127.0.0.1", 0)

    def environment(number):
        first = {"WORLD_SIZE": str(num_first), "LOCAL_WORLD_SIZE": str(num_first)}
        own = {**ALONE, "PATRICKSTAR_ELASTIC_JOINS": "1"} if number >= num_first else first
        return own | store.environment

    return rank_outcomes(
        num_first + num_joining,
        survive_with,
        options,
        f"127.0.0.1:{store.port}",
        kills,
        num_steps,
        str(log),
        environment=environment,
        timeout_seconds=100,
    )


def plain_losses(num_steps, global_batch=GLOBAL_BATCH):
    """By step, the mean loss of plain PyTorch; and the samples, and the last parameters."""
    torch.set_num_threads(1)
    model, data = build(), samples()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    losses, seen = [], []
    for batch in itertools.islice(ElasticSampler(NUM_SAMPLES, global_batch, global_batch, seed=1), num_steps):
        _, inputs, targets = data[batch]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        seen.append(sorted(batch))
    return losses, seen, model.state_dict()


def check_losses(values, log, num_steps=NUM_STEPS, global_batch=GLOBAL_BATCH, tolerance=1e-4):
    losses, seen, state = plain_losses(num_steps, global_batch)
    lines = [json.loads(line) for path in log.iterdir() for line in path.read_text().splitlines()]
    for step in range(num_steps):
        those = [line for line in lines if line["step"] == step]
        last = [line for line in those if line["recoveries"] == max(line["recoveries"] for line in those)]
        assert sorted(sample for line in last for sample in line["seen"]) == seen[step]
        mean = torch.tensor([loss for line in last for loss in line["losses"]]).mean()
        torch.testing.assert_close(mean, torch.tensor(losses[step]), rtol=tolerance, atol=tolerance)
    for value in values:
        for name, expected in state.items():
            if "state" in value:
                torch.testing.assert_close(value["state"][name], expected, rtol=tolerance, atol=tolerance)


def check(num_first, kills, *, num_left, folder, **options):
    (folder / "shards").mkdir()
    outcomes = outcomes_of(num_first, kills, folder / "log", shards=str(folder / "shards"), **options)
    for number, outcome in enumerate(outcomes):
        assert outcome.returncode == (-signal.SIGKILL if number in kills else 0), outcome.output
    values = [outcome.value for number, outcome in enumerate(outcomes) if number not in kills]
    trained = [value for value in values if value["end"] is Next.TRAIN]
    assert [value["num_ranks"] for value in trained] == [num_left] * num_left
    assert {value["num_lost"] for value in trained} == {len(kills)}
    assert not list((folder / "shards").iterdir())
    return values, trained


def repeated(values):
    """Steps that were begun more than once, and how often."""
    (attempts,) = {tuple(value["attempts"]) for value in values}
    return {step: attempts.count(step) for step in attempts if attempts.count(step) > 1}


FEW = [(3, {0: (2, Point.UPDATED)}, {2: 2}), (4, {1: (1, Point.SENDING), 3: (2, Point.BACKWARD)}, {0: 2, 2: 2})]
MANY = [
    *((3, {victim: (step, point)}, None) for victim in range(3) for point in Point for step in (1, 2)),
    (2, {0: (2, Point.BACKWARD)}, {2: 2}),
    (2, {1: (0, Point.FORWARD)}, {0: 2}),
    (4, {1: (2, Point.UPDATED), 2: (2, Point.BACKWARD)}, {2: 3}),
    (4, {0: (1, Point.STEP), 1: (2, Point.STEP), 2: (3, Point.STEP)}, {1: 2, 2: 2, 3: 2}),
]


@pytest.mark.parametrize(("num_ranks", "kills", "again"), FEW, ids=str)
def test_a_killed_rank_costs_one_step(num_ranks, kills, again, tmp_path):
    values, trained = check(num_ranks, kills, num_left=num_ranks - len(kills), folder=tmp_path)
    assert repeated(trained) == again
    check_losses(trained, tmp_path / "log")


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "kills", "again"), MANY, ids=str)
def test_ranks_are_killed_at_any_point(num_ranks, kills, again, tmp_path):
    _, trained = check(num_ranks, kills, num_left=num_ranks - len(kills), folder=tmp_path)
    assert repeated(trained) == again if again is not None else sum(repeated(trained).values()) in (0, 2)
    check_losses(trained, tmp_path / "log")


def check_joined(victim, folder):
    """Two ranks become three after the first step; then one of them dies."""
    options = {"num_joining": 1, "plan": {1: 3}, "num_steps": 5}
    _, trained = check(2, {victim: (3, Point.UPDATED)}, num_left=2, folder=folder, **options)
    check_losses(trained, folder / "log", num_steps=5)


def test_a_rank_dies_after_another_one_has_joined(tmp_path):
    check_joined(0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 2])
def test_another_rank_dies_after_one_has_joined(victim, tmp_path):
    check_joined(victim, tmp_path)


def test_ranks_that_do_not_divide_the_batch_leave(tmp_path):
    values, trained = check(4, {2: (1, Point.STEP)}, num_left=2, folder=tmp_path, global_batch=8)
    assert [value["end"] for value in values].count(Next.LEAVE) == 1
    check_losses(trained, tmp_path / "log", global_batch=8)


def test_without_copies_the_others_go_on_from_the_checkpoint(tmp_path):
    options = {"redundancy": 0, "checkpoint": str(tmp_path / "checkpoint")}
    _, trained = check(3, {0: (2, Point.UPDATED)}, num_left=2, folder=tmp_path, **options)
    check_losses(trained, tmp_path / "log")
    (again,) = outcomes_of(1, {}, tmp_path / "again", checkpoint=options["checkpoint"])
    assert (again.value["attempts"], again.value["num_lost"]) == ([], 0)  # what an earlier start has lost
    outcomes = outcomes_of(2, {1: (1, Point.STEP)}, tmp_path / "another", redundancy=0)
    assert outcomes[0].value["end"] == "failed"
    assert "neither copies of its shards nor a checkpoint" in outcomes[0].value["error"]


@pytest.mark.parametrize(("redundancy", "step"), [(1, 3), pytest.param(0, 4, marks=pytest.mark.slow)])
def test_the_batch_becomes_the_nearest_that_the_others_can_share(redundancy, step, tmp_path):
    """The leader dies in a step of 27 samples, with copies in the first one; two ranks take 28, and later another."""
    store = serve_rendezvous("127.0.0.1", 0)
    orders = {1: (3, 24), 3: (3, 27), 6: (2, 20)}
    first = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", **store.environment}
    outcomes = rank_outcomes(
        3, follow, f"127.0.0.1:{store.port}", orders, str(tmp_path), 9, 99 if redundancy == 0 else -1, (0, step),
        redundancy,
        environment=lambda _: first, timeout_seconds=100,
    )  # fmt: skip
    assert [outcome.returncode for outcome in outcomes] == [-signal.SIGKILL, 0, 0], outcomes
    values = [outcome.value for outcome in outcomes[1:]]
    batches = [12, 24, 24, 27, 28, 28, 20, 20, 20]
    batches[step] = 28
    plain = replay(dict(enumerate(batches)))
    for value in values:  # the leader's part of the steps before is gone
        value["losses"] = {number: losses for number, losses in value["losses"].items() if number >= step}
    check_against_replay(values, plain, range(step, 9))
    for value in values:
        assert all(value["parts"].values())  # measured on the new ranks too
        assert value["num_samples"] == plain["num_samples"] == Orders(store).report().num_samples
        for name, expected in plain["state"].items():
            torch.testing.assert_close(value["state"][name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits(precision, tmp_path):
    _, trained = check(3, {1: (2, Point.UPDATED)}, num_left=2, folder=tmp_path, precision=precision)
    check_losses(trained, tmp_path / "log", tolerance=0.1)


def values_across_nodes(nodes, kills, num_steps, options, folder):
    """Results of processes that do not die: two ranks on each of two nodes, and any others on the second one. Each
    process has a folder of its own for shards; the first one serves the rendezvous.
    """
    (folder / "log").mkdir(parents=True)
    for number in range(len(nodes)):
        (folder / str(number)).mkdir()
    first = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    joining = {**ALONE, "PATRICKSTAR_ELASTIC_JOINS": "1"}
    outcomes = rank_outcomes(
        len(nodes),
        survive_across_nodes_with,
        {**options, "shards": f"{folder}/{{}}"},
        nodes[0].address,
        free_port(),
        kills,
        num_steps,
        str(folder / "log"),
        nodes=nodes,
        environment=lambda number: {**first, "LOCAL_RANK": str(number % 2)} if number < 4 else joining,
        timeout_seconds=100,
    )
    expected = [-signal.SIGKILL if number in kills else 0 for number in range(len(nodes))]
    assert [outcome.returncode for outcome in outcomes] == expected, outcomes
    return [outcome.value for number, outcome in enumerate(outcomes) if number not in kills]


@pytest.mark.slow
def test_two_nodes_of_two_ranks_lose_one_and_let_another_go(tmp_path):
    """Rank 1's copies are on the other node; later three ranks resize to two."""
    with two_nodes() as (one, other):
        nodes = [one, one, other, other]
        values = values_across_nodes(nodes, {1: (2, Point.UPDATED)}, 5, {"plan": {4: 2}}, tmp_path)
    trained = [value for value in values if value["end"] is Next.TRAIN]
    assert sorted(value["end"].name for value in values) == ["LEAVE", "TRAIN", "TRAIN"]
    assert [(value["num_ranks"], value["num_lost"]) for value in trained] == [(2, 1)] * 2
    check_losses(trained, tmp_path / "log", num_steps=5)


def test_a_whole_node_leaves_and_another_one_joins(tmp_path):
    """Losses and parameters have the bits of the same resizes on one node."""
    options = {"plan": {1: {"num_ranks": 2, "leaving": (2, 3)}, 3: 4}}
    found = {}
    with two_nodes() as (one, other):
        for where, nodes in (("two", [one] * 2 + [other] * 4), ("one", [one] * 6)):
            values = values_across_nodes(nodes, {}, 5, options, tmp_path / where)
            assert [value["end"].name for value in values] == ["TRAIN"] * 2 + ["LEAVE"] * 2 + ["TRAIN"] * 2
            assert [value["attempts"] for value in values] == [[0, 1, 2, 3, 4]] * 2 + [[0]] * 2 + [[3, 4]] * 2
            trained = [value for value in values if value["end"] is Next.TRAIN]
            check_losses(trained, tmp_path / where / "log", num_steps=5)
            lines = [json.loads(line) for path in (tmp_path / where / "log").iterdir() for line in path.open()]
            found[where] = sorted((line["step"], sorted(line["seen"]), line["losses"]) for line in lines), trained
    assert found["two"][0] == found["one"][0]
    for value, expected in zip(found["two"][1], found["one"][1], strict=True):
        assert_same_bits(value["state"], expected["state"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["initialize", "accelerate"])
def test_other_scripts_go_on_too(kind):
    found = []
    for num_ranks in (1, 3):
        store = serve_rendezvous("127.0.0.1", 0)
        outcomes = rank_outcomes(num_ranks, survive_in_another_script, f"127.0.0.1:{store.port}", kind)
        values = [outcome.value for outcome in outcomes if outcome.returncode == 0]
        assert len(values) == max(num_ranks - 1, 1)
        found.append([torch.tensor([loss for value in values for loss in value[step]]).mean() for step in (2, 3)])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


LEADER, MEMBER, JOINING = 0, 1, 2
IN_A_RESIZE = [(victim, phase) for victim in (LEADER, MEMBER, JOINING) for phase in ResizePhase]
FEW_IN_A_RESIZE = [
    (LEADER, ResizePhase.GATHER),
    (LEADER, ResizePhase.PUBLISH),
    (LEADER, ResizePhase.OPEN),
    (MEMBER, ResizePhase.BUILD),
    (JOINING, ResizePhase.GATHER),
    (JOINING, ResizePhase.CHECK),
    (JOINING, ResizePhase.CLOSE),
]


def check_resize(victim, phase, folder):
    """Two ranks resize to three after the second step, when a process dies. No timeout ends the waits of the others,
    the process that joins included.
    """
    (folder / "shards").mkdir()
    options = {"num_joining": 1, "plan": {2: 3}, "kill_in": (victim, phase), "shards": str(folder / "shards")}
    outcomes = outcomes_of(2, {}, folder / "log", **options)
    assert outcomes[victim].returncode == -signal.SIGKILL, outcomes[victim].output
    values = [outcome.value for number, outcome in enumerate(outcomes) if number != victim]
    for outcome in outcomes:
        assert outcome.returncode in (0, -signal.SIGKILL) or outcome is outcomes[JOINING], outcome.output
    trained = [value for value in values if value is not None and value["end"] is Next.TRAIN]
    old = [outcome for number, outcome in enumerate(outcomes[:JOINING]) if number != victim]
    assert all(outcome.value in trained for outcome in old)
    check_losses(trained, folder / "log")
    assert not list((folder / "shards").iterdir())


@pytest.mark.parametrize(("victim", "phase"), FEW_IN_A_RESIZE, ids=str)
def test_old_ranks_survive_a_kill_within_a_resize(victim, phase, tmp_path):
    check_resize(victim, phase, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "phase"), [case for case in IN_A_RESIZE if case not in FEW_IN_A_RESIZE], ids=str)
def test_old_ranks_survive_a_kill_in_any_phase(victim, phase, tmp_path):
    check_resize(victim, phase, tmp_path)


@pytest.mark.parametrize("phase", [ResizePhase.BUILD, pytest.param(ResizePhase.CLOSE, marks=pytest.mark.slow)], ids=str)
def test_one_rank_survives_a_process_that_joins_it(phase, tmp_path):
    outcomes = outcomes_of(1, {}, tmp_path / "log", num_joining=1, plan={2: 2}, kill_in=(1, phase))
    assert [outcome.returncode for outcome in outcomes] == [0, -signal.SIGKILL], outcomes
    assert repeated([outcomes[0].value]) == {}
    check_losses([outcomes[0].value], tmp_path / "log")


def report(worlds, own, mirrored):
    return Report(host="here", worlds=worlds, own=own, mirrored=mirrored)


def test_the_newest_generation_counts_that_is_whole():
    worlds = {0: ("a", "b", "c", "d")}
    old, new = Generation(0, 4), Generation(0, 5)
    reports = {"a": report(worlds, (old, new), (old, new)), "b": report(worlds, (old, new), (old,))}
    reports |= {"d": report(worlds, (old, new), (old, new))}
    verdict = judge(reports)
    assert (verdict.generation, verdict.survivors, verdict.lost) == (new, ("a", "b", "d"), [2])
    assert [verdict.holder(old) for old in range(4)] == ["a", "b", "d", "d"]
    reports["d"] = report(worlds, (old, new), (old,))
    assert judge(reports).generation == old
    del reports["d"]  # two neighbours
    assert judge(reports).generation is None
    assert judge(reports).survivors == ("a", "b")


def test_a_process_that_joined_after_the_copies_does_not_go_on():
    before, after = {0: ("a", "b")}, {0: ("a", "b"), 1: ("a", "b", "c")}
    old = (Generation(0, 4),)
    reports = {"a": report(after, old, old), "b": report(before, old, old), "c": report({1: after[1]}, (), ())}
    assert judge(reports).survivors == ("a", "b")
    assert judge(reports).generation == old[0]

import pytest
import torch
from torch import nn

from patrickstar.elastic import (
    BatchRange,
    ElasticSampler,
    GradientNoise,
    GradientParts,
    LearningRateRule,
    Orders,
    serve_rendezvous,
)
from patrickstar.elastic.batches import batch_environment
from patrickstar.elastic.run_batch import RunBatch
from patrickstar.runtime import initialize_engine
from tests.distributed import RanksFailedError, run_ranks
from tests.elastic import batch_runs, runs
from tests.elastic.batch_runs import BATCHES, follow, replay
from tests.elastic.test_run import environment
from tests.training import make_config

ORDERS = {2: (1, 24), 4: (2, 18), 7: (2, 30), 9: (1, 25), 11: (2, 12), 13: (2, 6)}
"""Batches alone, and ranks and batch at once; one rank has 25 samples, which two cannot share."""


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    store, folder = serve_rendezvous("127.0.0.1", 0), tmp_path_factory.mktemp("changed")
    address = f"127.0.0.1:{store.port}"
    results = run_ranks(3, follow, address, ORDERS, str(folder), 16, environment=environment)
    return results, Orders(store)


def by_step(results, key):
    found = {}
    for result in results:
        for step, values in result[key].items():
            found.setdefault(step, []).extend(values if isinstance(values, list) else [values])
    return found


def check_against_replay(results, plain, steps):
    losses, seen, rates = (by_step(results, key) for key in ("losses", "seen", "rates"))
    assert sorted(losses) == list(steps)
    for step in steps:
        assert sorted(seen[step]) == sorted(plain["seen"][step])
        assert sum(losses[step]) / len(losses[step]) == pytest.approx(plain["losses"][step], rel=2e-4)
        assert rates[step] == pytest.approx([plain["rates"][step]] * len(rates[step]))


def test_losses_rates_and_samples_are_those_of_a_replay_on_one_process(changed):
    results, orders = changed
    batches = {step: some[0] for step, some in by_step(results, "batches").items()}
    assert [batches[step] for step in (1, 2, 4, 7, 9, 11, 13)] == [12, 24, 18, 30, 25, 12, 6]
    plain = replay(batches)
    check_against_replay(results, plain, range(16))
    (last,) = [result for result in results if "state" in result and result["batches"].get(0)]
    for name, value in plain["state"].items():
        torch.testing.assert_close(last["state"][name], value, rtol=1e-3, atol=1e-4)
    assert last["num_samples"] == plain["num_samples"] == orders.report().num_samples
    assert [orders.outcome(number).reason for number in range(1, len(ORDERS) + 1)] == [""] * len(ORDERS)


def test_an_order_outside_of_the_range_or_the_ranks_changes_nothing(tmp_path):
    store = serve_rendezvous("127.0.0.1", 0)
    orders = {1: (1, 36), 3: (1, 18), 4: (4, 18)}
    (result,) = run_ranks(1, follow, f"127.0.0.1:{store.port}", orders, str(tmp_path), 7, environment=environment)
    given = Orders(store)
    assert "batch of 36 samples was ordered, and the job's range is 6 to 30" in given.outcome(1).reason
    assert given.outcome(2).reason == ""
    assert "18 samples has no equal parts for 4 ranks" in given.outcome(3).reason
    assert list(result["batches"].values()) == [12, 12, 12, 18, 18, 18, 18]
    check_against_replay([result], replay(result["batches"]), range(7))  # the warm-up goes on after the refusal


def test_a_killed_run_goes_on_with_its_batch_samples_and_rates(tmp_path):
    store = serve_rendezvous("127.0.0.1", 0)
    with pytest.raises(RanksFailedError):
        run_ranks(1, follow, f"127.0.0.1:{store.port}", {3: (1, 30)}, str(tmp_path), 12, 5, environment=environment)
    batches = {step: 12 if step < 3 else 30 if step < 5 else 18 for step in range(12)}
    store = serve_rendezvous("127.0.0.1", 0)

    def started(_):
        return batch_environment(BATCHES, 18)

    # on other ranks, with the batch that the scheduler wants
    two = run_ranks(2, follow, f"127.0.0.1:{store.port}", {}, str(tmp_path), 12, 99, environment=started)
    plain = replay(batches)
    check_against_replay(two, plain, range(5, 12))
    for step in range(5):
        seen = (tmp_path / f"seen-{step}-0").read_text().split()
        assert sorted(map(int, seen)) == sorted(plain["seen"][step])


def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients])


def plain_parts(num_samples, num_parts):
    """(squared norms of the parts' gradients, squared norm of their mean), at the initial values."""
    model = runs.build()
    sampler = ElasticSampler(runs.NUM_SAMPLES, num_samples, num_samples, seed=batch_runs.SEED)
    _, inputs, targets = runs.samples().tensors
    parts = []
    for indices in torch.tensor(next(iter(sampler))).chunk(num_parts):
        loss = nn.functional.mse_loss(model(inputs[indices]), targets[indices])
        parts.append(flat(torch.autograd.grad(loss, list(model.parameters()))))
    return [part.square().sum().item() for part in parts], torch.stack(parts).mean(0).square().sum().item()


def measure(micro_batch, precision="fp32", **options):
    """Three steps without learning. One rank measures once it expects several micro-batches."""
    config = make_config(precision, default_chunk_size=16384, **options)
    config["optimizer"]["params"].update(lr=0.0, weight_decay=0.0)
    config["optimizer"]["params"]["use_hybrid_adam"] = precision == "fp32"  # else states rest on the host
    engine, optimizer = initialize_engine(runs.build, 0, config)
    engine.measure_gradient_parts()
    num_ranks = engine._session.chunk_ranks.size
    sampler = ElasticSampler(runs.NUM_SAMPLES, 24, micro_batch, seed=batch_runs.SEED)
    sampler.set_ranks(engine._session.ranks.context.rank, num_ranks)
    data, divisor = runs.samples(), num_ranks if "gradient_allreduce_op" in options else 1
    found = []
    for _ in range(3):
        micro_batches = list(sampler)[: sampler.division.accumulation]
        for indices in micro_batches:
            _, inputs, targets = data[indices]
            loss = nn.functional.mse_loss(engine(inputs).float(), targets)
            engine.backward(loss / len(micro_batches) / divisor)
        optimizer.step()
        found.append(engine.gradient_parts)
    engine.close()
    return found


def measure_sums(micro_batch):
    return measure(micro_batch, gradient_allreduce_op="sum")


def test_parts_are_the_gradients_of_micro_batches_or_ranks():
    squares, whole = plain_parts(24, 4)
    alone = measure(6)
    assert alone[0] is None  # it did not expect a second micro-batch
    for found in alone[1:]:
        assert (found.num_parts, found.part_squares) == (4, pytest.approx(squares[0], rel=1e-4))
        assert found.step_squares == pytest.approx(whole, rel=1e-4)
    assert measure(24) == [None] * 3
    for precision in ("bf16", "fp16"):  # fp16 has a loss scale
        for found in measure(6, precision)[1:]:
            assert found.part_squares == pytest.approx(squares[0], rel=0.03)
            assert found.step_squares == pytest.approx(whole, rel=0.03)
    for add_up in (measure, measure_sums):
        for found in run_ranks(2, add_up, 6):
            for each in found:  # the first micro-batches of both ranks
                assert each.num_parts == 4
                assert each.part_squares == pytest.approx((squares[0] + squares[2]) / 2, rel=1e-4)
                assert each.step_squares == pytest.approx(whole, rel=1e-4)
    for found in run_ranks(2, measure, 12):
        (first, second), _ = plain_parts(24, 2)
        assert found[0].part_squares == pytest.approx((first + second) / 2, rel=1e-4)
        assert found[0].num_parts == 2


@pytest.mark.parametrize(("global_batch", "num_parts"), [(16, 2), (48, 6)])
def test_the_noise_scale_is_the_variance_over_the_squared_gradient(global_batch, num_parts):
    generator = torch.Generator().manual_seed(7)
    true = torch.randn(200, generator=generator)
    scale = 9.0 * 200 / true.square().sum().item()  # samples have a standard deviation of 3 in each of 200 directions
    noise = GradientNoise()
    for step in range(400):
        parts = true + 3 / (global_batch / num_parts) ** 0.5 * torch.randn(num_parts, 200, generator=generator)
        squares = parts[0].square().sum().item(), parts.mean(0).square().sum().item()
        noise.note(GradientParts(num_parts, *squares), global_batch)
        assert step >= 19 or noise.scale is None
    assert noise.scale == pytest.approx(scale, rel=0.2)
    again = GradientNoise()
    again.load_state_dict(noise.state_dict())
    again.note(GradientParts(1, 1.0, 1.0), global_batch)  # one micro-batch on one rank tells nothing
    assert again.scale == noise.scale


class DeepSpeedLike:
    """An engine that does not measure its noise."""

    def __init__(self, ranks_per_sample=1):
        self.ranks_per_sample = ranks_per_sample


def test_ranks_that_share_samples_count_as_one():
    sampler = ElasticSampler(120, 12, 4)
    RunBatch(DeepSpeedLike(ranks_per_sample=2), [sampler]).set_ranks(3, 4)
    assert (sampler.rank, sampler.division.num_ranks) == (1, 2)


def test_a_range_that_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match="min 8, base 4 and max 16 samples"):
        BatchRange(min=8, base=4, max=16, rule=LearningRateRule.NONE)
    with pytest.raises(ValueError, match="warmup_steps is -1"):
        BatchRange(min=1, base=1, max=1, rule=LearningRateRule.NONE, warmup_steps=-1)
    with pytest.raises(ValueError, match="a DeepSpeedLike has one batch"):
        RunBatch(DeepSpeedLike(), [ElasticSampler(120, BATCHES, 4)])
    with pytest.raises(ValueError, match="the script's batch is fixed"):
        RunBatch(DeepSpeedLike(), [ElasticSampler(120, 12, 4)]).set(24)
    assert BatchRange.of_plain(BATCHES.as_plain()) == BATCHES
    with pytest.raises(ValueError, match="data set has 20 samples and a global batch 30"):
        ElasticSampler(20, BATCHES, 4)
    state = ElasticSampler(120, 48, 4).state_dict()
    with pytest.raises(ValueError, match="global_batch 48 instead of 6 to 30"):
        ElasticSampler(120, BATCHES, 4).load_state_dict(state)

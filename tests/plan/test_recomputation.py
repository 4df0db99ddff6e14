import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable

import pytest
import torch

from patrickstar import _C
from patrickstar.activations.activation_rules import Saved
from patrickstar.activations.call_measurement import CallMeasurement, clock_of, typical_calls
from patrickstar.activations.selective_recomputation import ComparedProducts
from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.module.preprocess import plan_params
from patrickstar.planning.ladder import Ladder, SavedLimit
from patrickstar.planning.machines import H200
from patrickstar.planning.planned_recomputation import shortest_recomputation
from patrickstar.planning.recomputation import (
    MeasuredStep,
    PlacedEngine,
    choose_roughly,
    choose_rung,
    choose_saved,
    placed_step,
    predicted_seconds,
    recomputation_text,
    steady_seconds,
)
from patrickstar.planning.saved_steps import most_sent, sent_bytes, step_with_saved
from patrickstar.planning.step_plan import SavedCalls
from patrickstar.planning.timeline import TimedTimeline, play_accesses
from patrickstar.planning.uses import trace_uses
from patrickstar.runtime import initialize_engine
from tests.models import VOCAB, llama
from tests.training import make_host_config

LAYERS = 4
NOTHING, PRODUCTS, ON_HOST, EVERYTHING = Saved
CHOICES = [
    (NOTHING, NOTHING, NOTHING, EVERYTHING),
    (EVERYTHING,) * LAYERS,
    (PRODUCTS,) * LAYERS,
    (NOTHING, PRODUCTS, PRODUCTS, EVERYTHING),
    (ON_HOST, NOTHING, ON_HOST, PRODUCTS),
    (ON_HOST, ON_HOST, ON_HOST, PRODUCTS),
]


@contextlib.contextmanager
def opened():
    torch.manual_seed(0)
    build = functools.partial(llama, hidden=64, layers=LAYERS, length=64)
    engine, optimizer = initialize_engine(build, 0, make_host_config("bf16", default_chunk_size=4096))
    tokens = torch.randint(0, VOCAB, (2, 64), generator=torch.Generator().manual_seed(1))

    def step(before_update=lambda: None):
        engine.backward(engine(input_ids=tokens, labels=tokens)["loss"])
        before_update()
        optimizer.step()
        optimizer.zero_grad()

    with engine:
        engine.train()
        engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        yield engine, step


def timeline(saved):
    with opened() as (engine, step):
        engine._session.checkpoint_calls.choose(saved)
        for _ in range(3):
            step()
        return engine._session.runtime.timeline()


def measured():
    """A third step measured as a first one, and facts of its engine."""
    with opened() as (engine, step):
        session = engine._session
        params = (param for param in engine.module.parameters() if isinstance(param, ChunkedParameter))
        storages = {param._patrickstar.storage for param in params}
        runtime, device = session.runtime, session.device
        measurement = CallMeasurement(
            lambda: runtime.num_accesses - 1, clock_of(device), device, storages.__contains__, ComparedProducts()
        )
        step()
        step()
        session.checkpoint_calls.observe(measurement)
        session.runtime.ask_for_step_so_far()
        found = []
        step(lambda: found.append(session.runtime.step_so_far()))
        accesses, times, stalls = found[0]
        calls = measurement.finish(stalls)
        assert not measurement.products_differ
        timed = TimedTimeline(accesses, times["compute_seconds"], 0, calls=calls)
        return MeasuredStep(timed=timed, rates=times["rates"]), session.layout, session.runtime.placement_facts()


@pytest.fixture(scope="module")
def first():
    return measured()


@pytest.mark.parametrize("saved", CHOICES)
def test_the_timeline_is_that_of_a_step_that_saves(first, saved):
    actual = timeline(saved)
    expected = step_with_saved(first[0].timed, saved).accesses
    assert [access["phase"] for access in expected] == [access["phase"] for access in actual]
    assert [access["uses"] for access in expected] == [access["uses"] for access in actual]
    high = max(access["activation_peak_bytes"] for access in actual)
    assert high <= max(access["activation_peak_bytes"] for access in expected) <= 1.3 * high


def test_calls_are_measured(first):
    step, _, _ = first
    assert [call.number for call in step.timed.calls] == list(range(LAYERS))
    assert len({(call.saved_bytes, call.product_bytes) for call in step.timed.calls}) == 1
    for call in step.timed.calls:
        assert call.forward_begin < call.forward_end <= call.recompute_begin < call.recompute_end
        assert 0 < call.product_bytes < call.saved_bytes
        assert 0 < call.product_seconds < call.recompute_seconds


def test_a_trace_measures_the_same_calls(first):
    step, layout, _ = first
    with torch.device("meta"):
        module = llama(hidden=64, layers=LAYERS, length=64)
    module.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.empty(2, 64, dtype=torch.long, device="meta")
    params = plan_params(module, torch.bfloat16, use_cpu_embedding=False)
    uses = trace_uses(module, params, torch.bfloat16, {"input_ids": tokens, "labels": tokens}, H200.gpu)
    traced = play_accesses(uses, layout, [True] * layout.num_chunks).timed(uses)
    places = [(call.number, call.forward_begin, call.recompute_begin, call.recompute_end) for call in traced.calls]
    calls = step.timed.calls
    assert places == [(call.number, call.forward_begin, call.recompute_begin, call.recompute_end) for call in calls]
    for here, there in zip(traced.calls, calls, strict=True):
        assert here.saved_bytes == pytest.approx(there.saved_bytes, rel=0.05)
        assert here.product_bytes == pytest.approx(there.product_bytes, rel=0.05)
        assert 0 < here.product_seconds < here.recompute_seconds
        assert sum(traced.seconds) > LAYERS * here.recompute_seconds


def test_disturbed_calls_get_times_of_the_others(first):
    step, _, _ = first
    slow = dataclasses.replace(step.timed.calls[1], recompute_seconds=9.0, product_seconds=8.0)
    clean = typical_calls([step.timed.calls[0], slow, *step.timed.calls[2:]])
    assert max(call.recompute_seconds for call in clean) < 1.0
    other = dataclasses.replace(slow, saved_bytes=1)  # of another kind
    assert typical_calls([*step.timed.calls, other])[-1] == other


def test_ladder():
    ladder = Ladder(3, has_products=True)
    rungs = [[kept.name[0] for kept in ladder.saved(rung)] for rung in range(ladder.top + 1)]
    assert ["".join(rung) for rung in rungs] == ["NNN", "NNP", "NPP", "PPP", "PPE", "PEE", "EEE"]
    sending = ladder.sending(2)
    rungs = [[kept.name[-1] for kept in sending.saved(rung)] for rung in range(sending.top + 1)]
    assert ["".join(rung) for rung in rungs[:4]] == ["GGG", "TTS", "TSS", "SSS"]
    assert [sending.saved(rung) for rung in range(3, 7)] == [ladder.saved(rung) for rung in range(3, 7)]
    assert [kept.name[-1] for kept in Ladder(8, has_products=True, num_sent=3).saved(1)] == list("TGTGTGGS")
    ladder = Ladder(2, has_products=False)
    assert [ladder.saved(rung) for rung in range(ladder.top + 1)][-1] == (EVERYTHING, EVERYTHING)
    assert ladder.top == 2


@pytest.mark.parametrize("best", [0, 1, 7, 23, 40, 63, 64])
def test_the_shortest_step_is_found_with_few_plans(best):
    ladder, played = Ladder(32, has_products=True), []

    def seconds_of(rungs):
        played.extend(rungs)
        return [float("inf") if rung > best + 20 else 2.0 + 0.05 * abs(rung - best) for rung in rungs]

    assert choose_rung(ladder.top, seconds_of).rung == best
    assert len(played) == len(set(played)) <= 20


@pytest.mark.parametrize(
    ("num_sent", "gain", "expected"),
    [(0, 0.1, (0, 0)), (6, 0.1, (6, 1)), (6, 0.001, (0, 0)), (2, 0.02, (0, 0)), (2, 0.04, (2, 1))],
)
def test_products_are_sent_where_that_pays(num_sent, gain, expected):
    """``gain``: seconds that each sender saves, where saved products on the device cost more than they save."""

    def seconds_of(ladder, rungs):
        sent = [ladder.saved(rung).count(ON_HOST) for rung in rungs]
        return [2.0 + 0.1 * max(rung - 1, 0) - gain * count for rung, count in zip(rungs, sent, strict=True)]

    choice = choose_saved(Ladder(8, has_products=True), num_sent, seconds_of)
    assert (choice.saved.count(ON_HOST), choice.rung) == expected
    assert choice.seconds == min(2.0, 2.0 - gain * expected[0])
    text = recomputation_text(choice.saved, choice.seconds, choice.tried[0])
    assert ("on the host" in text) == (expected[0] > 0)


def test_copies_of_products_slow_updates_on_the_host(first):
    engine, step = placed_engine(first)
    engine.budget.limit_bytes = 0
    numel = sum(engine.layout.chunk(index)["numel"] for index in range(engine.layout.num_chunks))
    saved = (ON_HOST, *(NOTHING,) * (LAYERS - 2), PRODUCTS)
    with placed_step(engine, step, saved) as placed:
        assert not any(placed.on_device)
        copied_bytes = 2 * step.timed.calls[0].product_bytes  # to and from memory; an update moves 28 bytes a parameter
        assert placed.host_slowdown == pytest.approx(1 + copied_bytes / (28 * numel))
    with placed_step(engine, step, (PRODUCTS,) * LAYERS) as placed:
        assert placed.host_slowdown == 1


def test_as_many_calls_send_as_the_link_carries(first):
    step, _, _ = first
    calls = step.timed.calls
    seconds = sum(sum(step.timed.seconds[call.forward_begin + 1 : call.forward_end + 1]) for call in calls)
    gbps = 2.5 * calls[0].product_bytes / seconds / 1e9
    assert most_sent(step.timed, gbps, 2**40) == 2
    assert most_sent(step.timed, 2 * gbps, 2**40) == LAYERS - 1
    assert most_sent(step.timed, gbps, calls[0].product_bytes) == 1
    assert sent_bytes(calls, (ON_HOST, PRODUCTS, ON_HOST)) == 2 * calls[0].product_bytes


def test_copies_of_products_in_a_timeline(first):
    step, _, _ = first
    timed = step_with_saved(step.timed, (ON_HOST, ON_HOST, ON_HOST, PRODUCTS))
    one, two, three, last = step.timed.calls
    for index, copies in enumerate(timed.copies):
        assert copies.leaving == (one.product_bytes if index in {c.forward_end for c in (one, two, three)} else 0)
        back = {call.recompute_begin + 1 for call in (two, three, last)}
        assert copies.coming == (one.product_bytes if index in back else 0)
        needed = {call.recompute_begin + 1 for call in (one, two, three)}
        assert copies.needed == (one.product_bytes if index in needed else 0)
    staying = step_with_saved(step.timed, (PRODUCTS,) * LAYERS)
    fewer = [
        index
        for index, (sent, kept) in enumerate(zip(timed.accesses, staying.accesses, strict=True))
        if sent["activation_peak_bytes"] < kept["activation_peak_bytes"]
    ]
    # The first call's are gone once the third has sent its own; two calls' may be on their way.
    assert fewer == list(range(three.forward_end + 1, two.recompute_begin + 1))


def test_products_where_backward_is_one_access(first):
    step, _, _ = first
    end = len(step.timed.seconds) - 1
    calls = [dataclasses.replace(call, recompute_begin=end, recompute_end=end) for call in step.timed.calls]
    timed = step_with_saved(dataclasses.replace(step.timed, calls=calls), (ON_HOST, *(PRODUCTS,) * (LAYERS - 1)))
    assert [timed.copies[end].coming, timed.copies[end].needed] == [calls[0].product_bytes] * 2


def test_of_almost_equal_steps_the_one_with_least_memory():
    assert choose_rung(16, lambda rungs: [1.0 - 1e-5 * rung for rung in rungs]).rung == 0


def test_a_rough_choice_tries_quarters():
    tried = choose_roughly(16, lambda rungs: [abs(rung - 9) + 1.0 for rung in rungs])
    assert (tried.rung, list(tried.tried)) == (8, [0, 4, 8, 12, 16])
    assert choose_roughly(16, lambda rungs: [1.0 - 1e-5 * rung for rung in rungs]).rung == 0
    assert list(choose_roughly(2, lambda rungs: [float("inf")] * len(rungs)).tried) == [0, 1, 2]


@dataclasses.dataclass
class PlayedRungs:
    """A predictor: steps compute for ``1 - 0.01 * rung`` seconds, and the link is busy for ``link_seconds`` of it."""

    link_seconds: Callable[[int], float]
    recomputations: Ladder = dataclasses.field(default_factory=lambda: Ladder(16, has_products=True))
    played: list[int] = dataclasses.field(default_factory=list)

    def rung(self, saved):
        return next(r for r in range(self.recomputations.top + 1) if self.recomputations.saved(r) == tuple(saved))

    def most_sent(self, _):
        return 0

    def compute_seconds(self, _, saved):
        return 1.0 - 0.01 * self.rung(saved)

    def predict(self, setting, saved, bound=None):
        self.played += [self.rung(saved)] if bound is not None else []
        seconds = max(self.compute_seconds(setting, saved), self.link_seconds(self.rung(saved)))
        step = types.SimpleNamespace(seconds=seconds, compute_seconds=self.compute_seconds(setting, saved))
        return PlayedCase(types.SimpleNamespace(accumulation=1), step, tuple(saved))


@dataclasses.dataclass
class PlayedCase:
    setting: types.SimpleNamespace
    step: types.SimpleNamespace
    saved: tuple[Saved, ...]


@pytest.mark.parametrize(
    "link_seconds, most",
    [(lambda _: 0.0, 13), (lambda _: 0.9, 13), (lambda rung: 0.5 + 0.04 * rung, 13), (lambda rung: 1 + 0.1 * rung, 4)],
    ids=["compute", "link", "link of saved bytes", "link alone"],
)
def test_rungs_that_cannot_be_worth_it_are_not_simulated(link_seconds, most):
    predictor = PlayedRungs(link_seconds)
    ladder = predictor.recomputations
    base = predictor.predict(types.SimpleNamespace(accumulation=1), ladder.saved(0))
    (found,) = shortest_recomputation(predictor, [base], choose_rung)
    steps = [max(1.0 - 0.01 * rung, link_seconds(rung)) for rung in range(ladder.top + 1)]
    assert found.step.seconds <= 1.01 * min(steps)
    assert predictor.rung(found.saved) <= next(rung for rung, seconds in enumerate(steps) if seconds == min(steps))
    assert len(predictor.played) <= most


def placed_engine(first, host_params_per_second=1e7, recompute_seconds=5e-4, product_seconds=3e-4):
    """An engine whose link carries 0.05 GB/s, and a measured step of it with these times."""
    step, layout, (budget, host_bytes, tiers) = first
    rates = _C.Rates()
    rates.upload_gbps = rates.download_gbps = 0.05
    rates.host_adam_params_per_second = host_params_per_second
    rates.device_adam_params_per_second = 1e9
    times = {"recompute_seconds": recompute_seconds, "product_seconds": product_seconds}
    calls = [dataclasses.replace(call, **times) for call in step.timed.calls]
    timed = dataclasses.replace(step.timed, seconds=[1e-4] * len(step.timed.seconds), calls=calls)
    engine = PlacedEngine(
        layout=layout, budget=budget, host_bytes=host_bytes, resting_tiers=[_C.Tier.HOST] * len(tiers),
        has_device_states=True, start=_C.UpdateStart.SPECULATIVE, scale=_C.ExpectedScale.EXACT,
    )  # fmt: skip
    return engine, MeasuredStep(timed=timed, rates=rates)


def chosen_within(engine, step, limit_bytes):
    ladder = Ladder(LAYERS, has_products=True)
    engine.budget.limit_bytes = limit_bytes
    return choose_rung(
        ladder.top, lambda rungs: [predicted_seconds(engine, step, ladder.saved(rung)) for rung in rungs]
    )


def test_more_memory_never_gives_a_longer_step(first):
    """Up to the 1 % within which steps count as equal (WORTH_SAVING)."""
    engine, step = placed_engine(first)
    limits = (1_000_000, 1_500_000, 2_000_000, 3_000_000, 4_000_000)
    choices = [chosen_within(engine, step, limit) for limit in limits]
    best = [choice.tried[choice.rung] for choice in choices]
    assert all(later <= earlier * 1.01 for earlier, later in zip(best, best[1:], strict=False))
    assert choices[-1].rung == 2 * LAYERS


@pytest.mark.parametrize(
    "times",
    [
        {"recompute_seconds": 1e-4, "product_seconds": 5e-5},  # a rung saves less than 1 % of the step
        {"host_params_per_second": 1e4},  # an update on the host takes longer than what a rung saves
    ],
    ids=["chunks for little", "chunks that take long"],
)
def test_if_all_fits_but_one_chunk_activations_give_way(first, times):
    engine, step = placed_engine(first, **times)
    ladder, num_chunks = Ladder(LAYERS, has_products=True), engine.layout.num_chunks

    def num_states_on_device(limit_bytes, rung):
        engine.budget.limit_bytes = limit_bytes
        with placed_step(engine, step, ladder.saved(rung)) as placed:
            return sum(placed.on_device)

    scarce, ample = 0, 2**26
    while ample - scarce > 1:
        limit = (scarce + ample) // 2
        scarce, ample = (scarce, limit) if num_states_on_device(limit, ladder.top) == num_chunks else (limit, ample)
    assert num_states_on_device(scarce, ladder.top) == num_chunks - 1
    choice = chosen_within(engine, step, scarce)
    print([engine.layout.chunk(index)["numel"] for index in range(num_chunks)], choice)
    assert num_states_on_device(scarce, choice.rung) == num_chunks
    assert choice.rung >= ladder.top - 2


def test_one_time_costs_of_a_first_step_do_not_count(first):
    step, _, _ = first
    numels = [4096] * len(step.timed.seconds)
    calls = [dataclasses.replace(call, recompute_seconds=8e-4) for call in step.timed.calls]
    seconds = [1e-4] * len(step.timed.seconds)
    clean = steady_seconds(seconds, calls, numels)
    for index in (calls[0].forward_begin + 2, calls[2].recompute_begin + 1, calls[1].recompute_end + 2, -1):
        seconds[index] = 3.0
    assert sum(steady_seconds(seconds, calls, numels)) <= 1.1 * sum(clean)


def test_larger_forwards_keep_to_the_planned_memory():
    sizes = SavedCalls(("products",) * 4, (10,) * 4, (30,) * 4, 100, 1000, False)
    limit = SavedLimit(sizes, peak_bytes=144)
    assert limit.rung == 4
    limit.follow(900, limit.rung)
    assert limit.rung == 4
    limit.follow(1200, limit.rung)  # 1.2 * (100 + 11 * 1) <= 144 < 1.2 * (100 + 11 * 2)
    assert limit.rung == 1
    assert limit.calls.base_bytes == 120
    assert limit.calls.product_bytes == (12,) * 4
    limit.follow(1000, limit.rung)
    assert limit.rung == 1  # never more again
    limit.follow(1000, 0)
    assert limit.calls.saved == ("nothing",) * 4


def test_larger_forwards_send_less():
    saved = ("products on host", "products on host", "products", "products")
    sizes = SavedCalls(saved, (10,) * 4, (30,) * 4, 100, 9, False)
    limit = SavedLimit(sizes, peak_bytes=150)
    assert limit.rung == 2
    limit.follow(10, limit.rung)  # 10 / 9 * (100 + 11 * 3) <= 150 < 10 / 9 * (100 + 11 * 4)
    assert limit.calls.saved == ("products on host", "products on host", "nothing", "products")
    limit.follow(12, limit.rung)
    assert limit.calls.saved == ("nothing",) * 4

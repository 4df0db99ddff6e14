"""Every scheme of updates on a GPU: the same bits on either side, in any budget, on a disk, and in place."""

import functools
import itertools

import pytest
import torch

from tests.engine import test_disk as disks
from tests.engine import test_round_trips as round_trip_tests
from tests.engine.test_speculation import on_host
from tests.gpu.test_equality import MIB, WIDE
from tests.schemes import Room, check_committed, check_waiting
from tests.training import assert_same, make_config, round_trips, taken_over, train

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@functools.cache
def quarter_of_model_data():
    with torch.device("meta"):
        return sum(param.numel() for param in WIDE.build().parameters()) * 14 // 4


ROOM = Room(WIDE, lambda config: quarter_of_model_data(), chunk=4 * MIB, small_chunk=64 * 1024)
CHUNKS = {"default_chunk_size": MIB}
IN_TURN = round_trip_tests.visiting(lambda step, chunk: (step + chunk) % 2 == 0, piece_numel=MIB // 4)
ALL = round_trip_tests.visiting(lambda step, chunk: True, piece_numel=MIB // 4)
SCARCE = {"8 bits": 320 * MIB, "8 bits without masters": 320 * MIB}  # values leave, and visitors still have room


@pytest.mark.parametrize(
    ("scheme", "precision"),
    [
        *itertools.product([("AdamW", "bf16"), ("AdamW", "8bit")], ["bf16", "fp32", "fp16"]),
        *itertools.product(itertools.product(["Lion", "SGD", "Nesterov"], ["fp32", "8bit"]), ["bf16", "fp32"]),
    ],
)
def test_updates_that_wait(scheme, precision):
    check_waiting(ROOM, scheme, precision=precision, gradient_clipping=0.1)


@pytest.mark.parametrize(
    "scheme",
    [("AdamW", "bf16"), ("AdamW", "8bit"), *itertools.product(["AdamW", "Lion"], ["fp32", "8bit"], ["stochastic"])],
)
def test_committed_updates(scheme):
    check_committed(ROOM, scheme)


@pytest.mark.parametrize("speculation", ["never", "always", "commit"])
def test_random_delays(speculation):
    expected = train(WIDE, make_config("bf16", default_chunk_size=4 * MIB), steps=6)
    config = make_config("bf16", default_chunk_size=4 * MIB, device_memory=400 * MIB)
    config["optimizer"] |= {"speculation": speculation}
    for seed in (1, 2):
        run = train(WIDE, {**config, "delays": {"max_random_us": 3000, "seed": seed}}, steps=6)
        assert run.report["uploaded_bytes"] > 0
        assert_same(run, expected)


@pytest.mark.parametrize("speculation", ["never", "always", "commit"])
@pytest.mark.parametrize("on_device", [False, True])
def test_states_on_disk(speculation, on_device, tmp_path):
    scheme = {"on_device": on_device, "speculation": speculation, **CHUNKS}
    expected = train(WIDE, disks.config_of(**scheme))
    budget = expected.report["num_parameters"] * 14 // (2 if on_device else 4)  # a quarter has no room for states
    run = train(WIDE, disks.on_disk(tmp_path, 0.2, case=WIDE, device_memory=budget, **scheme))
    assert_same(run, expected)
    disks.check_passed_through(run.report)
    assert (run.report["num_device_state_chunks"] > 0) == on_device


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_formats_of_states_on_disk(states, tmp_path):
    expected = train(WIDE, disks.config_of(states=states, **CHUNKS))
    run = train(WIDE, disks.on_disk(tmp_path, 0.2, case=WIDE, states=states, **CHUNKS))
    assert_same(run, expected)
    disks.check_passed_through(run.report)


@pytest.mark.parametrize("way", round_trip_tests.WAYS)
def test_round_trips(way):
    config = round_trip_tests.config_of(**round_trip_tests.WAYS[way], **CHUNKS)
    on_host_alone = train(WIDE, config, steps=3)
    for choose, memory in ((ALL, None), (IN_TURN, SCARCE.get(way, 448 * MIB))):
        run = train(WIDE, config | {"device_memory": memory}, steps=3, before_step=choose)
        assert_same(run, on_host_alone)
        assert round_trips(run.report) > 3


@pytest.mark.parametrize("rank", [None, 1, 4, 7])
def test_values_in_place(rank):
    report = train(WIDE, on_host("bf16", "never", **CHUNKS), steps=2).report
    host_memory = report["host_peak_bytes"] + report["num_chunk_elements"] // 2
    norms = sorted(train(WIDE, on_host("bf16", "never", **CHUNKS, gradient_clipping=1e9), steps=8).grad_norms)
    more = CHUNKS if rank is None else {**CHUNKS, "gradient_clipping": norms[rank]}
    run = train(WIDE, on_host("bf16", "always", host_memory=host_memory, **more), steps=8)
    assert taken_over(run.report) > 0 < run.report["num_values_in_place"]
    assert_same(run, train(WIDE, on_host("bf16", "never", **more), steps=8))

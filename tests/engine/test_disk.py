import functools
import logging
import resource

import pytest
import torch

from patrickstar import _C, CheckpointError, DiskError, MemoryBudgetError
from patrickstar.config import Dialect, parse_config
from patrickstar.runtime import initialize_engine
from tests import schemes
from tests.bits import assert_same_bits
from tests.models import MODELS, Case, gpt2, token_batch
from tests.training import assert_same, go_on, least_device_memory, num_committed, train, train_once

GPT2 = Case(lambda: gpt2(hidden=32, layers=12), token_batch)
STEPS = 4


def config_of(**more):
    return schemes.config_of(**{"on_device": False, "speculation": "never", "default_chunk_size": 4096, **more})


@functools.cache
def needed(case, accumulate=1, **scheme):
    """Host bytes for all states, and the least with a disk."""
    engine, _ = initialize_engine(case.build, 0, config_of(**scheme))
    with engine:
        layout = engine._session.layout
        backwards = _C.Backwards.SEVERAL if accumulate > 1 else _C.Backwards.ONE
        _, everything, _ = _C.initial_placement(layout, _C.UNLIMITED, 0, backwards)
        _, least, _ = _C.initial_placement(layout, 0, 0, backwards, _C.UNLIMITED)
    assert least < 0.9 * everything
    return everything, least


def disk(tmp_path, io="auto", **more):
    return {"disk_memory": {"path": str(tmp_path), "size": "64GiB", "io": io, **more}}


SCHEME = ["rule", "states", "master", "precision", "speculation", "default_chunk_size"]


def on_disk(tmp_path, share=0.0, *, accumulate=1, io="auto", case=GPT2, **more):
    """A host with ``share`` of the room between the least and the bytes of all states."""
    everything, least = needed(case, accumulate, **{key: more[key] for key in SCHEME if key in more})
    return config_of(host_memory=least + int(share * (everything - least)), **disk(tmp_path, io), **more)


def check_passed_through(report):
    assert 0 < report["num_disk_chunks"] <= report["num_chunks"]
    assert report["disk_bytes"] > 0
    assert report["disk_read_bytes"] > 0
    assert report["disk_written_bytes"] > 0
    assert report["host_peak_bytes"] <= report["host_budget_bytes"]


@pytest.mark.parametrize(
    ("precision", "share", "io"),
    [
        ("bf16", 0.0, "auto"),
        ("bf16", 0.0, "threads"),
        ("bf16", 0.5, "auto"),
        ("fp32", 0.1, "threads"),
        ("fp16", 0.3, "auto"),
    ],
)
def test_no_number_changes(precision, share, io, tmp_path):
    expected = train_once(GPT2, config_of(precision=precision, gradient_clipping=0.1), steps=STEPS)
    run = train(GPT2, on_disk(tmp_path, share, precision=precision, io=io, gradient_clipping=0.1), steps=STEPS)
    assert_same(run, expected)
    assert run.grad_norms == expected.grad_norms
    check_passed_through(run.report)
    assert run.report["host_peak_bytes"] <= run.report["predicted_host_peak_bytes"]
    last, before = run.chunk_reports[-1], run.chunk_reports[-2]
    print(f"{share}: {last['num_disk_chunks']} of {last['num_chunks']} chunks, {last['disk_io']}")
    # All states pass through once, except those still in memory when their turn comes.
    assert last["disk_written_bytes"] - before["disk_written_bytes"] == last["disk_bytes"]
    assert 0.5 * last["disk_bytes"] < last["disk_read_bytes"] - before["disk_read_bytes"] <= last["disk_bytes"]


@pytest.mark.parametrize("name", ["t5", "albert", "unused", "attention", "mixture_of_experts"])
def test_every_way_of_using_parameters(name, tmp_path):
    case, small = MODELS[name], {"default_chunk_size": 1024}
    expected = train_once(case, config_of(**small), steps=STEPS)
    run = train(case, on_disk(tmp_path, 0.1, case=case, **small), steps=STEPS)
    assert_same(run, expected)
    check_passed_through(run.report)


@pytest.mark.parametrize(
    "more",
    [
        {"states": "bf16"},
        {"states": "8bit"},
        {"speculation": "commit", "states": "8bit"},
        {"speculation": "commit", "master": "stochastic"},
        {"rule": "Lion"},
    ],
)
def test_formats_and_times_of_updates(more, tmp_path):
    expected = train_once(GPT2, config_of(**more), steps=STEPS)
    run = train(GPT2, on_disk(tmp_path, 0.2, **more), steps=STEPS)
    assert_same(run, expected)
    check_passed_through(run.report)
    if more.get("speculation") == "commit":
        assert num_committed(run.report) >= (STEPS - 1) * run.report["num_chunks"]


def test_gradients_that_accumulate(tmp_path):
    expected = train_once(GPT2, config_of(), steps=STEPS, accumulate=2)
    config = on_disk(tmp_path, 0.2, accumulate=2, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=2)
    run = train(GPT2, parse_config({**config, "gradient_clipping": 0}, Dialect.DEEPSPEED), steps=STEPS, accumulate=2)
    assert_same(run, expected)
    check_passed_through(run.report)


@pytest.mark.parametrize(("seed", "speculation"), [(0, "commit"), (2, "always"), (2, "commit")])
def test_random_delays(seed, speculation, tmp_path):
    expected = train_once(GPT2, config_of(), steps=STEPS)
    delays = {"max_random_us": 500, "seed": seed}

    def slow(engine, step):
        engine._session.runtime.disk_faults.seconds_per_piece = 2e-4
        engine._session.runtime.disk_faults.cuts_short = True

    config = on_disk(tmp_path, 0.1 * seed, speculation=speculation, delays=delays)
    run = train(GPT2, config, steps=STEPS, before_step=slow)
    assert_same(run, expected)
    check_passed_through(run.report)


def test_states_that_come_back_from_the_device(tmp_path):
    """A forward without a backward and an interrupted backward leave the plan: gradients find no room on the host and
    chunks are updated on the device. Their states come down into memory whose last chunk a slow disk is still writing.
    """
    expected = train_once(GPT2, config_of(), steps=STEPS + 1)
    device_bytes = least_device_memory(GPT2, config_of(), steps=2) + needed(GPT2)[0] // 8
    batch = token_batch(torch.Generator().manual_seed(0))

    def interfere(engine, step):
        engine._session.runtime.disk_faults.seconds_per_piece = 2e-3
        if step == 2:
            engine(**batch)
        if step == 3:
            interrupt_backward(engine, engine(**batch)["loss"])

    run = train(GPT2, on_disk(tmp_path, device_memory=device_bytes), steps=STEPS + 1, before_step=interfere)
    assert_same(run, expected)
    assert run.report["num_pressure_evictions"] > 0


def interrupt_backward(engine, loss):
    def interrupt(_gradient):
        raise KeyboardInterrupt

    handle = engine.module.transformer.h[6].mlp.c_fc.weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(loss)
    handle.remove()


def test_three_tiers(tmp_path):
    expected = train_once(GPT2, config_of(), steps=STEPS)
    everything, least = needed(GPT2)
    device_bytes = least_device_memory(GPT2, config_of(), steps=2) + everything // 4
    config = on_disk(tmp_path, 0.3, on_device=True, device_memory=device_bytes)
    run = train(GPT2, config, steps=STEPS)
    assert_same(run, expected)
    check_passed_through(run.report)
    assert run.report["host_peak_bytes"] <= run.report["predicted_host_peak_bytes"]
    first, last = run.chunk_reports[0], run.chunk_reports[-1]
    print(f"{first['num_disk_chunks']} of {last['num_chunks']} chunks on disk, then {last['num_disk_chunks']}")
    assert last["num_device_state_chunks"] > 0
    fewer = train(GPT2, on_disk(tmp_path, 0.3, device_memory=device_bytes), steps=STEPS)
    assert fewer.report["num_disk_chunks"] > last["num_disk_chunks"]
    assert_same(fewer, expected)


def test_skipped_steps(tmp_path):
    config = config_of(precision="fp16")
    config["fp16"] |= {"initial_scale_power": 24}
    expected = train(GPT2, config, steps=6)
    assert expected.report["num_skipped_steps"] > 0
    config = on_disk(tmp_path, 0.1, precision="fp16")
    config["fp16"] |= {"initial_scale_power": 24}
    assert_same(train(GPT2, config, steps=6), expected)


def test_unfreezing_is_refused_where_the_host_is_full(tmp_path):
    def frozen():
        model = gpt2(hidden=32, layers=12)
        model.transformer.h[0].requires_grad_(False)
        return model

    def unfreeze(engine, step):
        if step != 2:
            return
        engine.module.requires_grad_(True)
        with pytest.raises(MemoryBudgetError, match="unfrozen need .* or freeze them again"):
            engine(**token_batch(torch.Generator().manual_seed(0)))
        engine.module.transformer.h[0].requires_grad_(False)

    case = Case(frozen, token_batch)
    expected = train_once(case, config_of(), steps=STEPS)
    run = train(case, on_disk(tmp_path, 0.0, case=case), steps=STEPS, before_step=unfreeze)
    assert_same(run, expected)
    check_passed_through(run.report)


@pytest.mark.parametrize("speculation", ["never", "commit"])
def test_checkpoints(speculation, tmp_path):
    folder, states = tmp_path / "checkpoint", tmp_path / "disk"
    states.mkdir()
    with_disk = on_disk(states, 0.1, speculation=speculation)
    without = config_of(speculation=speculation)
    torch.manual_seed(0)
    saved = go_on(GPT2, with_disk, 3, folder, load=False, save=True)
    torch.manual_seed(1)
    assert_same_bits(go_on(GPT2, without, 0, folder, load=True), saved)
    assert_same_bits(go_on(GPT2, with_disk, 3, folder, load=True), go_on(GPT2, without, 3, folder, load=True))


FAULTS = {
    "read": ({"reads_before_error": 3}, "reading .* failed: Input/output error; check the disk"),
    "write": ({"writes_before_error": 3}, "writing .* failed: Input/output error; check the disk"),
    "full": ({"writes_before_error": 3, "error_number": 28}, "No space left on device; free space there"),
    "wrong bytes": ({"reads_before_flip": 3}, "are not those that were written .*CRC-32C.* is faulty"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A configuration with a disk, a checkpoint, and states after three steps from there."""

    @functools.cache
    def saved_with(speculation):
        states, folder = tmp_path_factory.mktemp("disk"), tmp_path_factory.mktemp("checkpoint")
        config = on_disk(states, 0.1, speculation=speculation)
        torch.manual_seed(0)
        go_on(GPT2, config, 2, folder, load=False, save=True)
        return config, folder, go_on(GPT2, config, 3, folder, load=True)

    return saved_with


@pytest.mark.parametrize(
    ("fault", "speculation"), [*((fault, "never") for fault in FAULTS), ("read", "commit"), ("full", "commit")]
)
def test_a_disk_that_fails(fault, speculation, saved):
    config, folder, expected = saved(speculation)
    values, message = FAULTS[fault]

    engine, optimizer = initialize_engine(GPT2.build, 0, config)
    engine.load_checkpoint(folder)
    for name, value in values.items():
        setattr(engine._session.runtime.disk_faults, name, value)
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(DiskError, match=message) as raised:
        for _ in range(3):
            engine.backward(GPT2.loss(engine(**GPT2.batch(generator))))
            optimizer.step()
            optimizer.zero_grad()
    assert config["disk_memory"]["path"] in str(raised.value)
    with pytest.raises(CheckpointError, match=f"what was saved before is as it was.*{message}"):
        engine.save_checkpoint(folder)
    with pytest.raises(DiskError):  # the module cannot get its values back
        engine.close()
    assert engine._session.runtime.closed
    assert_same_bits(go_on(GPT2, config, 3, folder, load=True), expected)


def test_a_disk_without_room(tmp_path):
    config = on_disk(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, hard))
    try:
        with pytest.raises(DiskError, match=r"optimizer states need \d.*iB .*in /.*Nothing was trained yet"):
            train(GPT2, config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    config = on_disk(tmp_path, device_memory=least_device_memory(GPT2, config_of(), steps=2))
    config["disk_memory"]["size"] = 1 << 18
    with pytest.raises(MemoryBudgetError, match=r"activations, and the disk has \d.*iB.*; .* or disk_memory.size"):
        train(GPT2, config)
    config["disk_memory"]["path"] = str(tmp_path / "none")
    with pytest.raises(ValueError, match="disk_memory.path is .*none', which is no folder; make it"):
        train(GPT2, config)


def test_deepspeeds_keys(tmp_path):
    config = on_disk(tmp_path, 0.1)
    del config["disk_memory"]
    config["zero_optimization"] = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    run = train(GPT2, config, steps=2)
    check_passed_through(run.report)
    assert_same(run, train_once(GPT2, config_of(), steps=2))


def test_the_predicted_step_knows_the_disk(tmp_path):
    found = []

    def look(engine, step):
        found.append(engine._session.runtime.predicted_step())
        planned = engine.plan().chunks if step > 0 else []
        assert not step or sum(chunk.disk_bytes for chunk in planned) == engine.report()["disk_bytes"]

    delays = {"link_gbps": 2.0}
    device_bytes = least_device_memory(GPT2, config_of(delays=delays), steps=2)
    run = train(GPT2, on_disk(tmp_path, 0.1, delays=delays, device_memory=device_bytes), steps=8, before_step=look)
    last = found[-1]
    assert last is not None
    assert last["disk_read_bytes"] == last["disk_written_bytes"] == run.report["disk_bytes"]
    assert last["disk_read_seconds"] > 0
    assert last["disk_write_seconds"] > 0


def test_what_the_log_says(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="patrickstar"):
        train(GPT2, on_disk(tmp_path, 0.1), steps=2)
    [line] = [record.getMessage() for record in caplog.records if "parameters in bfloat16" in record.getMessage()]
    assert "chunks on the device, of " in line
    assert " on disk (" in line
    assert str(tmp_path) in line


def test_nothing_is_on_disk_where_there_is_room(tmp_path):
    run = train(GPT2, config_of(**disk(tmp_path)), steps=2)
    assert run.report["num_disk_chunks"] == run.report["disk_bytes"] == run.report["disk_read_bytes"] == 0

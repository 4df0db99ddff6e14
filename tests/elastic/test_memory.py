import itertools

import pytest
import torch
from torch import nn

from patrickstar import _C
from patrickstar.checkpoint.memory import bytes_of
from patrickstar.runtime import initialize_engine
from patrickstar.session.closing import abandon_session
from patrickstar.session.lifecycle import evict_all
from tests.elastic.runs import build, state_of
from tests.elastic.test_resize import assert_same
from tests.training import make_config, make_host_config

ON_HOST = make_host_config("fp32", default_chunk_size=16384)
CONFIGS = {
    "on the device": make_config(default_chunk_size=16384),
    "on the host": ON_HOST,
    "on both": make_config(default_chunk_size=16384, device_memory=640 * 1024),
    "in 16 bits": make_host_config("bf16", default_chunk_size=16384),
}
for states in ("bf16", "8bit"):
    CONFIGS[states] = make_host_config("bf16", default_chunk_size=16384)
    CONFIGS[states]["optimizer"] |= {"states": states, "speculation": "commit"}
CONFIGS["split masters"] = make_host_config("bf16", default_chunk_size=16384)
CONFIGS["split masters"]["optimizer"]["speculation"] = "commit"


def trained(config, steps=3):
    engine, optimizer = initialize_engine(build, 0, config)
    step(engine, optimizer, steps)
    return engine, optimizer


def step(engine, optimizer, steps=1):
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 16)).float().square().mean())
        optimizer.step()


@pytest.mark.parametrize("name", CONFIGS)
def test_values_of_every_kind_keep_their_bits(name, tmp_path):
    engine, optimizer = trained(CONFIGS[name])
    with engine:
        before = state_of(engine, optimizer)
        engine.resize(1, folder=str(tmp_path))
        assert_same(before, state_of(engine, optimizer))
        step(engine, optimizer)
        after = state_of(engine, optimizer)
    engine, optimizer = trained(CONFIGS[name], 4)
    with engine:
        assert_same(after, state_of(engine, optimizer))


@pytest.mark.parametrize("name", CONFIGS)
def test_ranges_through_files_and_memory(name, tmp_path):
    engine, _ = trained(CONFIGS[name])
    with engine, (tmp_path / "file").open("xb+") as file:
        runtime = engine._session.runtime
        value = engine.state_dict()["0.weight"].flatten()
        size, memory = value.numel(), torch.full_like(value, 7.0)
        at, kind = memory.data_ptr(), _C.ArrayKind.MASTER
        files = [(file.fileno(), 4 * size)]
        parts = [(0, kind, 0, 10, -1, at), (0, kind, 10, 100, 0, 40), (0, kind, 100, size, -1, at + 400)]
        runtime.read_ranges(parts, files)
        assert torch.equal(memory[:10], value[:10]) and torch.equal(memory[100:], value[100:])
        assert (memory[10:100] == 7).all()
        written = torch.frombuffer(bytearray((tmp_path / "file").read_bytes()), dtype=torch.float32)
        assert torch.equal(written[10:100], value[10:100])
        memory.neg_()
        runtime.write_ranges([(0, kind, 0, 10, -1, at), parts[1], parts[2]], files)
        expected = torch.cat([-value[:10], value[10:100], -value[100:]])
        assert torch.equal(engine.state_dict()["0.weight"].flatten(), expected)
        with pytest.raises(ValueError, match=f"10 elements are given of a part of {size}"):
            runtime.write_ranges(parts[:1], files)
        file.truncate(100)
        with pytest.raises(RuntimeError, match=r"ends \d.* too early"):
            runtime.write_ranges(parts, files)
        with pytest.raises(RuntimeError, match="no room"):
            runtime.read_ranges(parts, [(file.fileno(), 2**60)])


@pytest.mark.parametrize("name", CONFIGS)
def test_ranges_in_memory_have_checksums(name):
    engine, _ = trained(CONFIGS[name])
    with engine:
        value = engine.state_dict()["0.weight"].flatten()
        size, memory = value.numel(), torch.full_like(value, 7.0)
        at, kind = memory.data_ptr(), _C.ArrayKind.MASTER
        cuts = [0, 40, 400, 4 * size]
        ranges = [(0, kind, begin, end, at + begin) for begin, end in itertools.pairwise(cuts)]
        crcs = engine._session.runtime.read_stored(ranges[::-1])[::-1]
        assert torch.equal(memory, value)
        assert crcs == [_C.crc32c(bytes_of(memory)[begin:end]) for begin, end in itertools.pairwise(cuts)]


def test_checksums_of_ranges_that_several_threads_copy():
    """Threads copy 4 MiB each."""
    engine, _ = initialize_engine(lambda: nn.Sequential(nn.Linear(1100, 2200)), 0, make_host_config("fp32"))
    with engine:
        value = engine.state_dict()["0.weight"].flatten()
        memory = torch.empty_like(value)
        ranges = [(0, _C.ArrayKind.MASTER, 12, 4 * value.numel(), memory.data_ptr() + 12)]
        assert engine._session.runtime.read_stored(ranges) == [_C.crc32c(bytes_of(value[3:]))]
        assert torch.equal(memory[3:], value[3:])


def test_a_rank_uses_the_host_memory_of_its_former_core(tmp_path):
    layers = [nn.Linear(256, 256) for _ in range(4)]
    engine, optimizer = initialize_engine(lambda: nn.Sequential(*layers), 0, ON_HOST)
    with engine:
        engine.backward(engine(torch.ones(1, 256)).square().mean())
        optimizer.step()
        free = evict_all(engine._session, engine._session.runtime.keep_memory).memory
        assert free.num_bytes >= 12 * sum(param.numel() for param in layers[0].parameters()) * 4
        abandon_session(engine._session, RuntimeError("the test ends"))

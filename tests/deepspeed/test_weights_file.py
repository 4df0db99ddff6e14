import errno
import gc
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import patrickstar as deepspeed
from patrickstar import CheckpointError, torch_scope
from patrickstar.checkpoint.disk import Disk
from patrickstar.deepspeed.weights_file import save_16bit_weights
from tests.bits import assert_same_bits
from tests.deepspeed.test_initialize import config
from tests.distributed import run_ranks

WIDTH, LAYERS = 64, 8
NAMES = ["pytorch_model.bin", "model.safetensors"]


class Net(nn.Module):
    """Tied weights, a parameter that stays with PyTorch, a buffer, a frozen layer; and many layers of one size."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        with torch_scope(do_allreduce=True):
            self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))
        self.layers[1].requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(self.layers(self.embed(x)))).float().square().mean()


def start(**more):
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(
        model=Net(), config=config(bf16={"enabled": True}, device_memory="2MB", gradient_accumulation_steps=1, **more)
    )
    return engine


def expected_of(engine, with_frozen=True):
    frozen = ("layers.1.",) if not with_frozen else ()
    return {
        name: value if name.startswith(("norm.", "count")) else value.bfloat16()
        for name, value in engine.state_dict().items()
        if not name.startswith(frozen or "-")
    }


def read(path):
    return torch.load(path, weights_only=True) if path.suffix == ".bin" else load_file(path)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_frozen", [True, False])
def test_what_is_in_it(tmp_path, name, with_frozen):
    path = tmp_path / "new" / "folder" / name
    with start() as engine:
        assert engine.save_16bit_model(path.parent, name, exclude_frozen_parameters=not with_frozen)
        expected = expected_of(engine, with_frozen)
    assert [found.name for found in path.parent.iterdir()] == [name]
    saved = read(path)
    if path.suffix == ".bin":
        assert saved["head.weight"].data_ptr() == saved["embed.weight"].data_ptr()
    else:
        del expected["head.weight"]  # tied: once, under its first name
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert_same_bits(saved, expected)


class FullDisk(Disk):
    def __init__(self, num_bytes, refused="write"):
        self._left, self._refused = num_bytes, refused

    def _refuse(self, where):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([str(where)] if not isinstance(where, int) else []))

    def write(self, fd, data):
        self._left -= len(data)
        return self._refuse(fd) if self._left < 0 else super().write(fd, data)

    def sync(self, fd):
        return self._refuse(fd) if self._refused == "sync" else super().sync(fd)

    def rename(self, source, target):
        return self._refuse(source) if self._refused == "rename" else super().rename(source, target)


def fail_and_go_on(folder):
    engine = start()
    path = folder / "model.safetensors"
    with engine:
        loss = engine(torch.arange(8))
        engine.backward(loss)
        engine.step()
        said = []
        for suffix in (".safetensors", ".bin"):
            path = path.with_suffix(suffix)
            if engine.global_rank == 0:
                path.write_bytes(b"before")
            disks = [FullDisk(size) for size in (0, 100, 10_000, 60_000)]
            disks += [FullDisk(10**9, refused) for refused in ("sync", "rename")]
            for disk in disks:
                try:
                    save_16bit_weights(engine._session, path, with_frozen=True, disk=disk)
                    said.append("saved")
                except CheckpointError as error:
                    said.append(str(error))
        engine.backward(engine(torch.arange(8)))
        engine.step()
        held = {name: held_bytes_while_saving(engine, folder / "again" / name) for name in NAMES}
        return said, held, expected_of(engine), engine.global_steps


def held_bytes_while_saving(engine, path):
    states, held = engine._session.states, []
    value_of = states.value

    def value(param):
        held.append(new_tensor_bytes())
        return value_of(param)

    states.value = value
    gc.collect()
    gc.freeze()  # existing objects are not listed
    try:
        engine.save_16bit_model(path.parent, path.name)
    finally:
        gc.unfreeze()
        del states.value
    assert len(held) >= 2 * LAYERS
    return max(held)


def new_tensor_bytes():
    tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor and found.device.type == "cpu"]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_two_ranks_fail_together_and_go_on(tmp_path):
    results = run_ranks(2, fail_and_go_on, tmp_path)
    parameter, model = 4 * WIDTH * WIDTH, 2 * LAYERS * WIDTH * WIDTH
    for rank, (said, held, _, steps) in enumerate(results):
        print(f"rank {rank} holds {held} bytes of {model}")
        assert len(said) == 12 and steps == 2
        for message in said:
            assert f"model.{'safetensors' if 'safetensors' in message else 'bin'} was not saved: rank 0: " in message
            assert f"{os.strerror(errno.ENOSPC)} ({tmp_path}" in message
        assert held["model.safetensors"] <= 2 * parameter
        if rank == 1:
            assert held["pytorch_model.bin"] <= 2 * parameter
        else:  # the measure sees a copy where there is one
            assert held["pytorch_model.bin"] > model / 2
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "model.bin", "again"}
    assert (tmp_path / "model.bin").read_bytes() == (tmp_path / "model.safetensors").read_bytes() == b"before"
    expected = results[0][2]
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == sorted(NAMES)
    assert_same_bits(read(tmp_path / "again" / "pytorch_model.bin"), expected)

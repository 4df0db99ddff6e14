import re
from pathlib import Path

import pytest
import torch
from torch import nn

from patrickstar.checkpoint import TensorRange
from patrickstar.checkpoint.foreign import find_foreign
from tests.checkpoint.foreign.deepspeed_files import save_zero
from tests.checkpoint.foreign.test_dcp_checkpoints import save_as_torchtitan
from tests.distributed import run_ranks

LAYERS, WIDTH = 8, 768
PARAM_BYTES = WIDTH * WIDTH * 4


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def anonymous_bytes():
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


class Sink:
    def __init__(self, tensors):
        self.tensors, self.seen = tensors, []

    def wanted(self):
        for tensor in self.tensors.values():
            fields = {name: getattr(tensor, name) for name in ("name", "kind", "shape", "dtype")}
            yield TensorRange(**fields, begin=0, end=tensor.numel)

    def write(self, wanted, values):
        assert values.numel() == wanted.numel
        float(values.sum())  # touches the values
        self.seen.append(anonymous_bytes())


def peaks(folders):
    return [peak(folder) for folder in folders]


def peak(folder):
    before = anonymous_bytes()
    with find_foreign(folder).open() as checkpoint:
        sink = Sink(checkpoint.manifest.tensors)
        checkpoint.check(sink)
        checkpoint.load(sink)
    assert len(sink.seen) == 3 * LAYERS
    return max(sink.seen) - before


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_loading_takes_a_few_parameters_memory(tmp_path):
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for stage in (2, 3):
        save_zero(tmp_path / f"zero{stage}", model, optimizer, stage=stage, ranks=2)
    save_as_torchtitan(tmp_path / "dcp", model, optimizer)
    names = ("zero2", "zero3", "dcp")
    (found,) = run_ranks(1, peaks, [tmp_path / name for name in names])
    print({name: f"{used / PARAM_BYTES:.1f} parameters" for name, used in zip(names, found, strict=True)})
    assert max(found) < 3.5 * PARAM_BYTES

import json

import pytest
import torch
from safetensors.torch import load_file

from patrickstar.checkpoint import Checkpoint, SaveOptions, save
from patrickstar.command.checkpoints import main
from tests.bits import assert_same_bits
from tests.checkpoint.ranks import Held, HeldSink, HeldSource, on_ranks

WEIGHT = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7
BIAS = torch.arange(5, dtype=torch.float32) / 3
COUNT = torch.tensor([3])
STATE = {
    "num_steps": 40,
    "step_counts": {"layer.weight": 40},
    "groups": [{"params": ["layer.weight", "layer.bias"], "options": {"lr": 0.1}}],
    "loss_scaler": None,
    "lr_scheduler": None,
    "extra_states": {},
    "client_state": {"epoch": 2},
}


def tensors():
    held = [
        Held("layer.weight", "master", WEIGHT, [0, 7, 12], (1, 0)),
        Held("layer.bias", "frozen", BIAS.bfloat16(), [0, 0, 5]),
        Held("count", "buffer", COUNT, [0, 1, 1]),
    ]
    return held + [Held("layer.weight", kind, WEIGHT * 2, [0, 5, 12], (1, 0)) for kind in ("exp_avg", "exp_avg_sq")]


@pytest.fixture
def folder(tmp_path):
    for tag, step in (("first", 20), ("second", 40)):
        results = on_ranks(
            2,
            lambda peers, tag=tag, step=step: save(
                tmp_path, tag, HeldSource(tensors(), peers.rank), STATE | {"num_steps": step}, SaveOptions(peers=peers)
            ),
        )
        assert results == [tmp_path / tag] * 2
    return tmp_path


def run(capsys, *words, expect=0):
    assert main([str(word) for word in words]) == expect
    return capsys.readouterr().out


def test_list(folder, capsys):
    found = json.loads(run(capsys, "list", folder, "--json"))
    assert found["latest"] == "second"
    assert [(item["tag"], item["step"], item["ranks"]) for item in found["checkpoints"]] == [
        ("first", 20, 2),
        ("second", 40, 2),
    ]
    size = sum(file.stat().st_size for file in (folder / "first").iterdir())
    assert found["checkpoints"][0]["bytes"] == size
    lines = run(capsys, "list", folder).splitlines()
    assert lines[2].split()[:2] == ["second", "40"] and lines[2].endswith("complete   <- latest")
    assert run(capsys, "list", folder / "first").count("complete") == 1


def test_list_says_which_are_not_complete(folder, capsys):
    next((folder / "first").glob("rank00001-*")).unlink()
    (folder / "second" / "manifest.json").write_text("{}")
    lines = run(capsys, "list", folder, expect=1).splitlines()
    assert any(line.startswith("first") and "NOT COMPLETE" in line and "rank00001" in line for line in lines)
    assert any(line.startswith("second") and "NOT COMPLETE" in line for line in lines)


def test_inspect(folder, capsys):
    found = json.loads(run(capsys, "inspect", folder, "--json"))
    assert (found["step"], found["ranks"], found["num_parameters"]) == (40, 2, 17)
    weight, bias = found["parameters"]
    assert weight == {
        "name": "layer.weight", "kind": "master", "dtype": "float32", "shape": [3, 4],
        "states": ["momentum", "variance"], "updates": 40, "shards": 2,
    }  # fmt: skip
    assert (bias["kind"], bias["dtype"], bias["states"]) == ("frozen", "bfloat16", [])
    assert [buffer["name"] for buffer in found["buffers"]] == ["count"]
    assert found["client_state"] == {"epoch": 2}
    text = run(capsys, "inspect", folder, "--tag", "first")
    for what in ("step 20", "17 parameters", "layer.weight", "3x4", "momentum, variance", '"lr": 0.1', '"epoch": 2'):
        assert what in text, text


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "stored"])
def test_export(folder, capsys, dtype):
    (folder / "config.json").write_text('{"model_type": "x"}')
    run(capsys, "export", folder, folder / "out", "--dtype", dtype, "--config", folder / "config.json")
    found = load_file(folder / "out" / "model.safetensors")
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    expected = {"layer.weight": WEIGHT, "layer.bias": BIAS.bfloat16()}
    if dtype != "stored":
        expected = {name: values.to(kinds[dtype]) for name, values in expected.items()}
    assert found.keys() == {*expected, "count"}
    for name, values in (expected | {"count": COUNT}).items():
        assert_same_bits(found[name], values)
    assert json.loads((folder / "out" / "config.json").read_text()) == {"model_type": "x"}


def test_export_in_several_files(folder, capsys):
    run(capsys, "export", folder, folder / "out", "--max-file-size", "10B")
    index = json.loads((folder / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    assert main(["export", str(folder), str(folder / "out")]) == 2
    assert "exists and is no empty folder" in capsys.readouterr().err


def test_merge(folder, capsys):
    run(capsys, "merge", folder, folder / "one", "--tag", "second")
    assert "latest is second" in run(capsys, "verify", folder)
    files = [file for file in (folder / "one").iterdir() if file.suffix == ".safetensors"]
    assert len(files) == 1
    assert_same_bits(load_file(files[0])["master/layer.weight"], WEIGHT)
    with Checkpoint(folder / "one") as checkpoint:
        assert checkpoint.manifest.num_ranks == 1
        assert checkpoint.manifest.state == STATE
        for rank in range(2):
            sink = HeldSink(tensors(), rank)
            checkpoint.load(sink)
            sink.check()
    assert main(["merge", str(folder), str(folder / "one")]) == 2
    assert "give the name of a new folder" in capsys.readouterr().err

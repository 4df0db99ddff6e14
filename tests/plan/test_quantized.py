import json

import pytest

from patrickstar.plan import main
from patrickstar.planning import simulation
from patrickstar.planning.machines import H200

MODEL = ["--model", "gpt:512x8", "--batch-size", "2", "--seq-len", "64", "--host-memory", "4GiB", "--no-advice"]
LINEAR = 8 * 12 * 512**2  # weights of the blocks' linear layers


def planned(capsys, *args):
    assert main([*MODEL, *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_bytes(capsys):
    small = ["--device-memory", "192MiB", "--chunk-numel", "524288", "--lora-rank", "8"]
    whole = planned(capsys, *small)
    found = planned(capsys, *small, "--quantization", "nf4")
    saved = whole["least_host_bytes"] - found["least_host_bytes"]
    assert saved == pytest.approx((2 - 0.5159) * LINEAR, rel=0.05)
    assert found["config"]["quantization"] == {"type": "nf4"}
    assert found["uploaded_bytes"] < whole["uploaded_bytes"]
    assert "quantization" not in whole["config"]


def test_dequantisation_takes_time(capsys, monkeypatch):
    question = ["--device-memory", "192MiB", "--chunk-numel", "524288", "--lora-rank", "8", "--gpu", "h200"]
    question += ["--quantization", "nf4"]
    busy = [planned(capsys, *question)["roofline_seconds"]]
    monkeypatch.setattr(simulation, "_dequantized_bytes", lambda chunks, rates: [])
    busy.append(planned(capsys, *question)["roofline_seconds"])
    more = sum(busy[0][queue] - busy[1][queue] for queue in ("compute", "upload"))
    once = (2 + 0.5159) * LINEAR / H200.gpu.memory_gbps / 1e9
    assert once * 0.3 < more < once * 3.1


def test_adapters_are_assumed(capsys):
    given = planned(capsys, "--device-memory", "1GiB", "--quantization", "nf4", "--lora-rank", "16")
    assumed = planned(capsys, "--device-memory", "1GiB", "--quantization", "nf4")
    assert assumed == given
    assert main([*MODEL, "--device-memory", "1GiB", "--quantization", "nf4"]) == 0
    assert "LoRA of rank 16, frozen weights in nf4" in capsys.readouterr().out


def test_wrong_types(capsys):
    with pytest.raises(SystemExit):
        main([*MODEL, "--quantization", "fp4"])
    assert "invalid choice: 'fp4'" in capsys.readouterr().err

import importlib
import json
import sys

import pytest

from benchmark import expert_peers, mixtures, run
from benchmark.mixtures import Implementation
from benchmark.mixtures.packages import pass_over


def measured(monkeypatch, capsys, *more):
    monkeypatch.setattr(sys, "argv", ["run", "expert_peers", "--json", "--tokens", "48", "--repeats", "1", *more])
    run.main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("shape", ["tiny", "tiny-biases"])
def test_ours_and_grouped_mm_agree_with_float32(monkeypatch, capsys, shape):
    result = measured(monkeypatch, capsys, "--shapes", shape, "--implementations", "grouped_mm")
    products, ours, other = result["rows"]
    assert [row["experts"] for row in result["rows"]] == ["products", "fused", "grouped_mm"]
    names = {"result", "hidden", "weights", "gate_up_proj", "down_proj"}
    if shape == "tiny-biases":
        names |= {"gate_up_proj_bias", "down_proj_bias"}
    for row in (ours, other):
        assert row["errors"].keys() == names
        assert all(0 < error < 0.01 for error in row["errors"].values())
        assert row["of_ours"] == row["ms"] / ours["ms"]
        assert row["tflops"] * row["ms"] == pytest.approx(18 * 48 * 2 * 64 * 32 / 1e9)
    assert products["ms"] > 0
    assert "more than rounding" not in expert_peers.format_table(result)


def test_what_is_missing_fails_or_differs_is_named(monkeypatch, capsys):
    def fails(layer):
        raise ValueError("rows of too many elements")

    others = {
        "liger": Implementation(lambda layer: 1.05 * layer.module(*layer.given), (), "SwiGLU alone"),
        "moe_ops": "ModuleNotFoundError: No module named 'moe_ops'",
        "scattermoe": Implementation(fails, ()),
    }
    find = mixtures.find
    monkeypatch.setattr(mixtures, "find", lambda name: others.get(name) or find(name))
    result = measured(monkeypatch, capsys, "--shapes", "tiny", "tiny-biases")
    rows = {(row["shape"], row["experts"]): row for row in result["rows"]}
    assert rows["tiny", "liger"]["errors"]["result"] == pytest.approx(0.05, rel=0.2)
    assert rows["tiny-biases", "liger"]["reason"] == "SwiGLU alone"
    assert rows["tiny", "scattermoe"]["reason"] == "ValueError: rows of too many elements"
    assert rows["tiny", "moe_ops"]["reason"] == others["moe_ops"] and "ms" not in rows["tiny", "moe_ops"]
    (line,) = [line for line in expert_peers.format_table(result).splitlines() if "more than rounding" in line]
    assert line.startswith("tiny ") and "result 0.0" in line


def test_a_peer_is_found_or_there_is_a_reason(monkeypatch):
    assert isinstance(mixtures.find("fused"), Implementation)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    monkeypatch.delitem(sys.modules, "benchmark.mixtures.liger", raising=False)
    assert "liger_kernel" in mixtures.find("liger")


def test_files_of_packages_above_are_passed_over(monkeypatch, tmp_path):
    inner = tmp_path / "trainer_of_a_peer" / "kernels"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").write_text("import a_package_that_is_missing")
    (inner / "products.py").write_text("from . import blocks\nnumber = blocks.number")
    (inner / "blocks.py").write_text("number = 128")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("", ".kernels", ".kernels.products", ".kernels.blocks"):
        monkeypatch.delitem(sys.modules, f"trainer_of_a_peer{name}", raising=False)
    pass_over("trainer_of_a_peer.kernels")
    assert importlib.import_module("trainer_of_a_peer.kernels.products").number == 128
    with pytest.raises(ModuleNotFoundError, match="another_peer"):
        pass_over("another_peer.kernels")

import hashlib
import re
import sys
from pathlib import Path

import pytest

import patrickstar

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "build_backend"), str(ROOT / "tools")]

import fetching  # noqa: E402
import patrickstar_build  # noqa: E402
import wheel  # noqa: E402
from patrickstar_pins import MINIMUM_TORCH, TORCH, WHEEL_TORCHES  # noqa: E402

INSTALLATION = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")


def make_torch(folder, version, cuda):
    folder.mkdir(parents=True)
    (folder / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
    return folder


def test_every_supported_minor_version_is_in_the_matrix_and_on_the_page():
    minors = [tuple(map(int, version.split(".")[:2])) for version in WHEEL_TORCHES]
    assert minors == [(2, minor) for minor in range(MINIMUM_TORCH[1], minors[-1][1] + 1)] and TORCH in WHEEL_TORCHES
    assert re.findall(r"^\| (2\.\d+\.\d+) \|", INSTALLATION, re.MULTILINE) == list(WHEEL_TORCHES)
    assert set(re.findall(r"patrickstar(?:\[\w+\])?==([\d.]+)\+", INSTALLATION)) == {patrickstar.__version__}


def test_the_page_for_find_links_has_every_wheel_with_its_hash(tmp_path):
    wheels = [tmp_path / f"patrickstar-0.7.0+{part}-cp311-cp311-manylinux_2_35_x86_64.whl" for part in ("cu13", "cpu")]
    for each in wheels:
        each.write_bytes(each.name.encode())
    links = re.findall(r'<a href="(.+)#sha256=(.+)">(.+)</a>', wheel.page(wheels))
    assert [name for _, _, name in links] == sorted(each.name for each in wheels)
    for address, digest, name in links:
        assert address == name.replace("+", "%2B") and digest == hashlib.sha256(name.encode()).hexdigest()


def test_two_versions_of_pytorch_must_give_the_same_losses():
    first = {"torch": "2.13.0", "shim": "torch2.13.cpu.so", "losses": [1.0, 0.5]}
    other = {"torch": "2.14.1", "shim": "torch2.14.cpu.so", "losses": [1.0 + 5e-7, 0.5]}
    wheel.check_equal(first, other)
    with pytest.raises(SystemExit, match=r"PyTorch 2.14.1 has loss 1.00001, PyTorch 2.13.0 1.0"):
        wheel.check_equal(first, other | {"losses": [1.00001, 0.5]})
    with pytest.raises(SystemExit, match=r"both trials ran with torch2.13.cpu.so"):
        wheel.check_equal(first, other | {"shim": "torch2.13.cpu.so"})


def test_the_cuda_wheel_gets_shims_for_its_cuda_alone(tmp_path, monkeypatch):
    older = make_torch(tmp_path / "older", "2.10.0+cu128", "12.8")
    newer = make_torch(tmp_path / "newer", "2.14.1+cu130", "13.0")
    without = make_torch(tmp_path / "without", "2.13.0+cpu", None)
    monkeypatch.setattr(fetching, "fetch_cuda", lambda: None)
    monkeypatch.setattr(fetching, "fetch_torch", lambda version: make_torch(tmp_path / "pinned", version, "13.0"))
    settings = wheel.cuda_settings([older, newer, without])
    assert settings["PATRICKSTAR_SHIMS"] == str(newer) and settings["PATRICKSTAR_CUDA"] == "1"
    monkeypatch.setenv("PATRICKSTAR_TORCH", settings["PATRICKSTAR_TORCH"])
    version, cuda = patrickstar_build.torch_versions()
    assert re.fullmatch(r"2\.\d+\.\d+", version) and cuda == "13.0"

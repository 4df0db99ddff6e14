"""Builds, checks (auditwheel) and tries a wheel with shims for one or several versions of PyTorch, into dist/.

    python tools/wheel.py                          # for the PyTorch of this Python (make wheel)
    python tools/wheel.py --torch 2.11.0 2.12.0    # for these, too: headers are fetched into .cache

The core is compiled once. A wheel's version names its part: patrickstar-0.7.0+cpu, or +cu13 with the CUDA part.
auditwheel determines the oldest Linux; PyTorch's and NVIDIA's libraries are not packed. The wheel is then installed
into a separate environment that sees this one's packages, and trains a model there. dist/index.html lists all wheels
with their hashes, for `pip install --find-links`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import environment  # noqa: E402
import fetching  # noqa: E402

DIST = ROOT / "dist"
# Libraries that PyTorch, imported first, has loaded.
NOT_PACKED = ["libtorch*.so", "libc10*.so", "libcudart.so.*", "libnccl.so.*"]

_TRIAL = """
import sys, torch, patrickstar
from patrickstar.runtime import initialize_engine

config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "device_memory": "24MiB", "plan_cache": False}
torch.manual_seed(0)
model, optimizer = initialize_engine(lambda: torch.nn.Linear(64, 64), local_rank=0, config=config)
rows, losses = torch.randn(16, 64), []
for step in range(3):
    optimizer.zero_grad()
    loss = (model(rows.to(model.device)) - rows.to(model.device)).square().mean()
    model.backward(loss)
    optimizer.step()
    losses.append(loss.item())
model.close()
assert losses[2] < losses[1] < losses[0], losses
assert patrickstar.__file__.startswith(sys.prefix), patrickstar.__file__
print(f"wheel: trains with PyTorch {torch.__version__}: losses {', '.join(f'{loss:.4f}' for loss in losses)}")
"""


def run(command: list[str], failure: str, **options) -> None:
    """Runs a command; exits with `failure` if it fails."""
    if subprocess.run(command, **options).returncode != 0:
        sys.exit(f"wheel: {failure}; see the message above")


def only_wheel(folder: str) -> Path:
    """Returns the only wheel in `folder`."""
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def build() -> Path:
    """Builds the wheel, lets auditwheel name its platform and returns its path in dist/."""
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as checked:
        command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet", "-w", plain]
        run([*command, str(ROOT)], "it was not built")
        excluded = [part for name in NOT_PACKED for part in ("--exclude", name)]
        command = [sys.executable, "-m", "auditwheel", "repair", "--patcher", "none", *excluded, "-w", checked]
        run([*command, str(only_wheel(plain))], "auditwheel does not accept it")
        made = only_wheel(checked)
        DIST.mkdir(exist_ok=True)
        return Path(shutil.move(made, DIST / made.name))


def try_out(wheel: Path) -> None:
    """Installs the wheel into an environment that sees this Python's packages, and trains there."""
    python = environment.beside(sys.executable, "wheel")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    run([*command, "--force-reinstall", str(wheel)], "it cannot be installed")
    elsewhere = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # PYTHONPATH has the checkout
    with tempfile.TemporaryDirectory() as folder:
        run([python, "-W", "ignore", "-c", _TRIAL], "what was installed does not train", cwd=folder, env=elsewhere)


def write_page() -> None:
    """Writes dist/index.html, a page for pip's --find-links."""
    links = []
    for wheel in sorted(DIST.glob("*.whl")):
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        links.append(f'<a href="{quote(wheel.name)}#sha256={digest}">{wheel.name}</a><br>')
    page = "\n".join(["<!DOCTYPE html>", "<title>patrickstar</title>", *links, ""])
    (DIST / "index.html").write_text(page, encoding="utf-8")


def main() -> None:
    """Builds, checks and tries a wheel."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="+", metavar="VERSION", default=[], help="shims for these versions, too")
    versions = parser.parse_args().torch
    os.environ["PATRICKSTAR_SHIMS"] = os.pathsep.join(str(fetching.fetch_torch(version)) for version in versions)
    wheel = build()
    try_out(wheel)
    write_page()
    print(f"wheel: {wheel.relative_to(ROOT)}, {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

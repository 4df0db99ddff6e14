"""Builds a wheel for the PyTorch that is there, or for several, into dist/; checked by auditwheel, and tried.

    python tools/wheel.py                          # for the PyTorch of this Python (make wheel)
    python tools/wheel.py --torch 2.6.0 2.13.0     # for each of these, in an environment of its own in .cache

The version of a wheel says which PyTorch it is for: patrickstar-0.6.0+torch2.13.cpu, or +torch2.11.cu130 with its CUDA
part. auditwheel names the oldest Linux on which it loads; PyTorch's libraries and NVIDIA's are not packed into it. Then
it is installed into an environment that has nothing else but the packages of this one, and a model is trained there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import environment  # noqa: E402

DIST = ROOT / "dist"
# PyTorch, imported first, has loaded them.
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
    """Runs it; exits with `failure` where it fails."""
    if subprocess.run(command, **options).returncode != 0:
        sys.exit(f"wheel: {failure}; see the message above")


def only_wheel(folder: str) -> Path:
    """The wheel in `folder`."""
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def build() -> Path:
    """Makes the wheel and has auditwheel name its platform; returns it, in dist/."""
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
    """Installs it into an environment that sees the packages of this Python, and trains there."""
    python = environment.beside(sys.executable, "wheel")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    run([*command, "--force-reinstall", str(wheel)], "it cannot be installed")
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which has the checkout
    with tempfile.TemporaryDirectory() as folder:
        run([python, "-W", "ignore", "-c", _TRIAL], "what was installed does not train", cwd=folder, env=elsewhere)


def build_for(version: str) -> None:
    """Runs this with an environment in .cache that has that PyTorch; makes it where there is none."""
    folder = ROOT / ".cache" / f"torch-{version}"
    python = str(folder / "bin" / "python")
    if not Path(python).exists() or environment.torch_version(python) is None:
        run([sys.executable, "-m", "venv", "--clear", str(folder)], "there is no environment to build it in")
        requirement = environment.torch_requirement(version)
        run([python, "-m", "pip", "install", "--quiet", *requirement], f"PyTorch {version} could not be installed")
    lacking = environment.missing(python, ["build", "wheel"])
    if lacking:
        environment.install(python, lacking)
    settings = folder / "build.cfg"  # objects for another PyTorch than that of `make build` stay apart
    settings.write_text(f"[build]\nbuild_temp = {folder / 'objects'}\n", encoding="utf-8")
    run(
        [python, __file__],
        f"there is none for PyTorch {version}",
        env=os.environ | {"DIST_EXTRA_CONFIG": str(settings)},
    )


def main() -> None:
    """Builds, checks, tries."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="+", metavar="VERSION", help="for these versions instead")
    options = parser.parse_args()
    for version in options.torch or []:
        build_for(version)
    if not options.torch:
        wheel = build()
        try_out(wheel)
        print(f"wheel: {wheel.relative_to(ROOT)}, {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

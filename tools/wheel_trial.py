"""Trains for three steps with the installed PatrickStar and PyTorch, and prints JSON; wheel.py runs it.

    {"torch": "2.14.1+cu130", "shim": "torch2.14.cpu.so", "losses": [1.31, 1.12, 0.96]}

Fails if patrickstar is not that of this environment, or if a shim was compiled instead of taken from the wheel.
"""

import json
import os
import sys
from pathlib import Path

import torch

import patrickstar
from patrickstar.runtime import initialize_engine

CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "device_memory": "256MiB",
    "plan_cache": False,
    "steps_per_print": 0,
}


def three_losses() -> list[float]:
    """Losses of a linear layer that learns the identity."""
    torch.manual_seed(0)
    model, optimizer = initialize_engine(lambda: torch.nn.Linear(64, 64), local_rank=0, config=CONFIG)
    rows, losses = torch.randn(16, 64), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(rows.to(model.device)) - rows.to(model.device)).square().mean()
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    model.close()
    return losses


def loaded_shims() -> set[Path]:
    """Shims that this process has loaded."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return {Path(path) for path in paths if "torch_shim" in path}


def main() -> None:
    """Trains, checks where everything comes from, and prints the result."""
    losses = three_losses()
    assert losses[2] < losses[1] < losses[0], losses
    package = Path(patrickstar.__file__).parent
    assert package.is_relative_to(sys.prefix), package
    (shim,) = loaded_shims()
    assert shim.parent == package / "torch_shim", shim
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.so"))
    print(json.dumps({"torch": torch.__version__, "shim": shim.name, "losses": losses}))


main()

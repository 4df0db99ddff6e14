import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import patrickstar
from patrickstar.finetune import training
from tests.distributed import run_python

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_PACKAGE_PARENT = str(Path(patrickstar.__file__).resolve().parents[1])


def run_example(
    script: str, *flags: object, ranks: int = 1, timeout_seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs ``examples/<script>`` on the simulated device, by torchrun for several ranks; returns its output."""
    paths = [_PACKAGE_PARENT, os.environ.get("PYTHONPATH")]
    python_path = os.pathsep.join(path for path in paths if path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [*torchrun, str(EXAMPLES / script), *map(str, flags)]
    result = run_python(*command, environment={"PYTHONPATH": python_path}, timeout_seconds=timeout_seconds)
    print(" ".join(command), result.stdout, result.stderr[-2000:], sep="\n")
    return result


@contextlib.contextmanager
def imported_example(name: str) -> Iterator[ModuleType]:
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr(os, "environ", os.environ.copy())
        yield importlib.import_module(name)
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(EXAMPLES)):
            del sys.modules[module]


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals = signal.SIGINT) -> None:
    train_step, steps = training.train_step, iter(range(1, 1000))

    def interrupted(*args):
        if next(steps) == step:
            signal.raise_signal(signum)
        return train_step(*args)

    monkeypatch.setattr(training, "train_step", interrupted)


def figure(output: str, pattern: str) -> float:
    """The number in the last match of ``pattern``."""
    found = re.findall(pattern, output)
    assert found, f"{pattern!r} is not in the output"
    return float(found[-1])


def check_report(output: str, baseline: str) -> None:
    number = r"([0-9.]+)"
    headers = list(re.finditer(rf".*: [0-9]+ steps.* {number} MiB of model data\n", output))
    trained = output[headers[-2].end() if len(headers) > 1 else 0 : headers[-1].start()]
    losses = [float(loss) for loss in re.findall(rf"step [0-9]+: held-out loss {number}", trained)]
    assert len(losses) >= 4
    assert losses == sorted(losses, reverse=True), f"the held-out loss rises: {losses}"
    assert losses[-1] < 0.95 * losses[0], f"the held-out loss hardly falls: {losses}"
    assert figure(output, rf"held-out loss +{number} \(") == losses[-1]
    for name, sign in (("loss", 1), ("accuracy", -1)):
        value = figure(output, rf"held-out {name} +{number}%? \({baseline}")
        trivial = figure(output, rf"held-out {name} .*{baseline}: {number}")
        assert sign * value < sign * trivial, f"held-out {name} {value}, {baseline} {trivial}"
    assert figure(output, rf"speed +{number} tokens/s") > 0
    device, host = (figure(output, rf"{side} peak +{number} MiB") for side in ("device", "host"))
    data = float(headers[-1].group(1))
    assert data > 0 and device + host >= data - 0.1, f"{data} MiB were held in {device} and {host} MiB"
    if "(no budget)" not in output:
        assert 0 < device <= figure(output, rf"of a budget of {number} MiB")


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG\r\n")

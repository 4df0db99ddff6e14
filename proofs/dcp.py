"""Kills and flipped bits of ``torch.distributed.checkpoint``, for the table of peers in docs/reliability.md.

    python -m proofs.dcp

* kills: a process is killed at each file system call of a save over an earlier one. Counted are those after which
  neither the old nor the new state can be loaded.
* flips: one random bit of the tensors' file changes. Counted are loads that raise an error.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from proofs.crash import killed_at
from proofs.faulty_calls import SOURCE
from proofs.preloaded import preload

_PREPARED = "PATRICKSTAR_PROOF_DCP"
_NUM_FLIPS = 200


def _state(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((64, 64), float(version)) for name in ("a", "b")}


def _save(folder: Path, version: int) -> None:
    dcp.save(_state(version), checkpoint_id=folder, no_dist=True)


def _loaded(folder: Path) -> dict[str, torch.Tensor] | None:
    """The stored state; None: the load raises an error."""
    state = {name: torch.zeros_like(values) for name, values in _state(0).items()}
    try:
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    except (Exception, CheckpointException):
        return None
    return state


def _is_version(state: dict[str, torch.Tensor] | None, version: int) -> bool:
    return state is not None and all(torch.equal(values, _state(version)[name]) for name, values in state.items())


def _kills(folder: Path) -> str:
    whole, saves = folder / "whole", folder / "saves"
    _save(whole, 1)
    num_calls = num_lost = 0
    while True:
        shutil.rmtree(saves, ignore_errors=True)
        shutil.copytree(whole, saves)
        if not killed_at(lambda: _save(saves, 2), saves, num_calls + 1):
            return f"killed at each of {num_calls} calls of an overwriting save, {num_lost} leave nothing to load"
        num_calls += 1
        state = _loaded(saves)
        num_lost += not (_is_version(state, 1) or _is_version(state, 2))


def _flips(folder: Path) -> str:
    chooser, path = random.Random(0), folder / "flips"
    _save(path, 1)
    (file,) = path.glob("*.distcp")
    data = file.read_bytes()
    values = [index for index in range(len(data)) if data[index : index + 4] == b"\x00\x00\x80?"]  # 1.0
    num_noticed = num_wrong = 0
    for _ in range(_NUM_FLIPS):
        changed = bytearray(data)
        changed[chooser.choice(values) + 2] ^= 1 << chooser.randrange(8)
        file.write_bytes(changed)
        state = _loaded(path)
        num_noticed += state is None
        num_wrong += state is not None and not _is_version(state, 1)
    return f"of {_NUM_FLIPS} flipped bits of values {num_noticed} are noticed; {num_wrong} are loaded"


def main() -> None:
    """Prints both counts."""
    if _PREPARED not in os.environ:
        os.environ.update(preload(SOURCE), **{_PREPARED: "1"})
        os.execv(sys.executable, [sys.executable, "-m", "proofs.dcp"])
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        print(f"torch {torch.__version__}, one rank")
        print(_kills(Path(folder)))
        print(_flips(Path(folder)))


if __name__ == "__main__":
    main()

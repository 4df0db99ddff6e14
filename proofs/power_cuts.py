"""Power cuts for ``make prove-crash``: states of a modelled journaling disk after a part of a save's calls."""

from __future__ import annotations

import functools
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patrickstar.checkpoint import Checkpoint, SaveOptions, save, tags
from patrickstar.state import save_load
from proofs.cases import Points, Setting, replaced
from proofs.training import Run, config, files
from tests.checkpoint import test_crashes as model
from tests.checkpoint.ranks import HeldSource

STATES_PER_PREFIX = 25
BLOCK = 8  # bytes that are on the disk or not, in place of 4096
MOST_OLD_STATES = 20_000  # drawn in a row without a new one


def template(path: Path, present: list[str], num_ranks: int) -> Path:
    """A folder with checkpoints of version 1."""
    for tag in present:
        model.save_version(path, 1, tag, num_ranks)
    return path


def check_folder(path: Path, expected: dict[str, set[int]]) -> str | None:
    """A complaint about a tag that leads to another version than those expected, or to none."""
    for tag in [None, *tags(path)]:
        try:
            version = model.loaded_version(path, tag)
        except Exception as error:
            return f"{tag or 'latest'}: {type(error).__name__}: {error}"
        if version not in (expected[tag] if tag is not None else {1, 2}):
            return f"{tag} is of version {version}"
    gone = [tag for tag, versions in expected.items() if versions == {1} and tag not in tags(path)]
    return f"{gone} are gone" if gone else None


def power_cuts(tag: str, others: list[str]) -> Callable[[Setting], Points]:
    """Points: states of the modelled disk after a power cut, of all prefixes of a save's calls."""

    def points(setting: Setting) -> Points:
        path, left = setting.folder / "saves", setting.folder / "left"
        template(path, ["old", *others], 1)
        modelled = model.ModelledDisk(path)
        options = SaveOptions(disk=modelled, max_file_bytes=40)
        save(path, tag, HeldSource(model.tensors(2, 1), 0), {"version": 2}, options)
        expected = {"old": {1} if tag == "new" else {1, 2}, "new": {2}, **dict.fromkeys(others, {1})}
        yield from after_cuts(setting, modelled, lambda: check_folder(left, expected), left)

    return points


def after_cuts(setting: Setting, modelled: Any, check: Callable[[], str | None], left: Path) -> Points:
    """Points: states of ``modelled`` after a power cut, which ``check`` finds in the folder ``left``."""
    generator, seen, num_old = random.Random(setting.seed), set[int](), 0
    while num_old < MOST_OLD_STATES:
        for number, tree in enumerate(modelled.states):
            setting.note(f"after {number} of {len(modelled.states) - 1} calls")
            for _ in range(STATES_PER_PREFIX):
                with replaced(model, "BLOCK", BLOCK):
                    state = model.after_a_cut(tree, generator)
                num_old = num_old + 1 if hash(state) in seen else 0
                if num_old > 0:
                    continue
                seen.add(hash(state))
                model.write_state(state, left)
                yield check()
                shutil.rmtree(left)


def power_cuts_beside_training(tag: str) -> Callable[[Setting], Points]:
    """Points: states of the modelled disk after a power cut while a thread saves an engine and training goes on."""

    def points(setting: Setting) -> Points:
        path, left = setting.folder / "saves", setting.folder / "left"
        run = Run(config(device_memory=110_000))
        run.step(0)
        expected = {"old": [files(run.engine.save_checkpoint(path, "old", {"step": 1}))]}
        run.step(1)
        now = files(run.engine.save_checkpoint(setting.folder / "reference", tag, {"step": 2}))
        expected[tag] = [*expected.get(tag, []), now]
        modelled = WaitingDisk(path)
        with replaced(save_load, "SaveOptions", functools.partial(SaveOptions, disk=modelled)):
            run.engine.save_checkpoint(path, tag, {"step": 2}, wait=False)
        run.step(2)
        modelled.goes_on.set()
        run.steps(3, 6)
        run.close()

        def check() -> str | None:
            try:
                for found in (None, *tags(left)):
                    with Checkpoint.find(left, found) as checkpoint:
                        checkpoint.verify()
            except Exception as error:
                return f"{found or 'latest'}: {type(error).__name__}: {error}"
            wrong = [found for found in tags(left) if files(left / found) not in expected[found]]
            return f"{wrong} have not the bytes of their step" if wrong else None

        yield from after_cuts(setting, modelled, check, left)

    return points


class WaitingDisk(model.ModelledDisk):
    """Lets a thread write only after a step."""

    most_bytes = 16 * 1024

    def __init__(self, root: Path):
        super().__init__(root)
        self.goes_on = threading.Event()

    def write(self, fd: int, data: memoryview) -> int:
        """Writes a part, as the model does."""
        if threading.current_thread() is not threading.main_thread():
            self.goes_on.wait()
        return int(super().write(fd, data))

"""prove-crash: the process is killed at each system call of a save, an export or a removal, and at random instants of
training; and the power is cut, during a save of the calling thread or of one beside training.

After each kill every tag must lead to a complete checkpoint, old or new and never mixed, and the next save must succeed
and leave nothing unfinished. Kills come from proofs/faulty_calls.c. Power cuts are states of a modelled journaling disk
(tests/checkpoint/test_crashes.py): data that was not synced is there, absent, zero or torn, and each folder has any of
its entries since its last sync. A real disk may order writes otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from patrickstar.checkpoint import Checkpoint, disk, folder, latest_tag, tags
from patrickstar.checkpoint.disk import Disk
from patrickstar.checkpoint.export import ExportOptions, export
from patrickstar.checkpoint.folder import NewFolder
from patrickstar.engine import saved_run
from proofs.cases import Case, Planted, Points, Proof, Setting, replaced
from proofs.faulty_calls import EVERY, SOURCE, Fault, How, failing
from proofs.power_cuts import check_folder, power_cuts, power_cuts_beside_training, template
from proofs.preloaded import preload
from proofs.training import files, in_8_bits
from tests.checkpoint import test_crashes as model
from tests.checkpoint.ranks import HeldSource

KILL = Fault("SIGKILL", EVERY, How.KILL)


def killed_at(call: Callable[[], object], target: Path, first: int) -> bool:
    """Forks a process that is killed at the ``first``-th system call of ``call`` on files below ``target``; False if
    there are not so many.
    """
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), failing(KILL, target, first):
            call()
            os._exit(0)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise AssertionError(f"the process ended with {code}")
    return code != 0


def system_calls(tag: str, others: list[str], num_ranks: int) -> Callable[[Setting], Points]:
    """Points: system calls of a save of ranks that are threads."""

    def points(setting: Setting) -> Points:
        whole = template(setting.folder / "template", ["old", *others], num_ranks)
        expected = {"old": {1, 2} if tag == "old" else {1}, "new": {2}, "next": {3}, **dict.fromkeys(others, {1})}
        path, killed, first = setting.folder / "saves", True, 0
        while killed:
            first += 1
            setting.note(f"call {first}")
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(whole, path)
            killed = killed_at(lambda: model.save_version(path, 2, tag, num_ranks), path, first)
            complaint = check_folder(path, expected)
            if complaint is None:
                results = model.save_version(path, 3, "next")
                left = [name.name for name in path.iterdir() if name.name.startswith(".")]
                if results != [path / "next"] or left:
                    complaint = f"the next save gives {results} and leaves {left}"
            yield complaint

    return points


def exports(setting: Setting) -> Points:
    """Points: system calls of an export, which is there completely or not at all."""
    shards = list(HeldSource(model.tensors(1, 1), 0).shards())
    options = ExportOptions(rename=str)
    target, killed, first = setting.folder / "weights", True, 0
    named = [shard for shard in shards if shard.kind == "master"]
    expected = files(export(setting.folder / "expected", named, options))
    while killed:
        first += 1
        setting.note(f"call {first}")
        killed = killed_at(lambda: export(target, named, options), setting.folder, first)
        found = files(target) if target.exists() else {}
        yield None if found in ({}, expected) else f"half of an export is there: {list(found)}"
        shutil.rmtree(target, ignore_errors=True)
        for left in setting.folder.glob(".saving-*"):
            shutil.rmtree(left)


def removals(setting: Setting) -> Points:
    """Points: system calls while an old checkpoint is removed."""
    whole = template(setting.folder / "template", ["a", "b"], 2)
    path, killed, first = setting.folder / "saves", True, 0
    while killed:
        first += 1
        setting.note(f"call {first}")
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        killed = killed_at(lambda: saved_run.remove_checkpoint(path / "a"), path, first)
        complaint = check_folder(path, {"a": {1, 2}, "b": {1}})
        if complaint is None and model.save_version(path, 3, "next") != [path / "next"]:
            complaint = "the next save fails"
        yield complaint


def random_instants(setting: Setting) -> Points:
    """Points: instants of training that saves beside training, every third time under one tag again."""
    path, reference, chooser = setting.folder / "saves", setting.folder / "reference", random.Random(setting.seed)
    expected: dict[int, dict[str, bytes]] = {}
    truth = in_8_bits()

    def expected_files(step: int) -> dict[str, bytes]:
        while step not in expected:
            number = len(expected)
            truth.step(number)
            expected[number + 1] = files(truth.engine.save_checkpoint(reference, "t", {"step": number + 1}))
            shutil.rmtree(reference)
        return expected[step]

    expected_files(STEPS_PER_LIFE)
    truth.close()
    had_latest = False
    for number in itertools.count():
        setting.note(f"kill {number}")
        seconds = chooser.uniform(0.02, 0.5)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                train_and_save(path)
            os._exit(1)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        complaint = None if code == -signal.SIGKILL else f"the process ended with {code} before it was killed"
        for tag in tags(path) if complaint is None else ():
            with Checkpoint.find(path, tag) as checkpoint:
                step = checkpoint.manifest.state["client_state"]["step"]
            if files(path / tag) != expected_files(step):
                complaint = f"{tag} is not the state after step {step}"
        has_latest = latest_tag(path) is not None  # the first save in a folder makes it last
        if complaint is None and not has_latest and (had_latest or len(tags(path)) > 1):
            complaint = "there is no latest checkpoint"
        yield complaint
        had_latest = has_latest
        if "end" in tags(path):
            shutil.rmtree(path)
            had_latest = False


STEPS_PER_LIFE = 24


def train_and_save(path: Path) -> None:
    """Resumes and trains until the process is killed."""
    run = in_8_bits()
    step = 0
    if latest_tag(path) is not None:
        _, state = run.engine.load_checkpoint(path)
        step = state["step"]
    while step < STEPS_PER_LIFE:
        run.step(step)
        step += 1
        tag = "end" if step == STEPS_PER_LIFE else "again" if step % 3 == 0 else f"step{step}"
        run.engine.save_checkpoint(path, tag, {"step": step}, wait=step % 2 == 0)
    run.engine.wait_for_save()
    while True:
        time.sleep(1)


def planted() -> Iterator[Planted]:
    """Bugs in how checkpoints are published."""
    new, old, cut = "saves under a new tag, 2 ranks", "saves under the tag that exists, 1 rank", "power cuts, a new tag"

    def by_two_renames(self: Disk, one: Path, other: Path) -> None:
        aside = one.with_name(f"{one.name}-aside")
        self.rename(other, aside)
        self.rename(one, other)
        self.rename(aside, one)

    def by_removal(self: Disk, one: Path, other: Path) -> None:
        disk.remove_tree(self, other)
        self.rename(one, other)
        self.make_folder(one)

    def in_place(disk_: Disk, path: Path, data: bytes, temporary: Path) -> None:
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(b"")
        with contextlib.ExitStack() as held:
            fd = held.enter_context(disk.opened(disk_, path))
            disk.write_all(disk_, fd, memoryview(data))

    def first_latest(self: NewFolder) -> None:
        self._target.parent.joinpath(folder.LATEST).write_bytes(folder.latest_bytes(self._target.name))
        publish(self)

    publish = NewFolder.publish

    def under_its_name(self: NewFolder) -> None:
        """Writes into the folder of the tag."""
        self._target.mkdir()
        (self._target / "manifest.json").write_bytes(b"{}")
        shutil.rmtree(self._target)
        publish(self)

    def by_files(path: Path) -> None:
        for file in sorted(path.iterdir(), reverse=True):
            file.unlink()
        path.rmdir()

    def nothing(*_: object) -> None:
        pass

    def unsynced(self: NewFolder) -> None:
        self._is_settled = True

    yield Planted("two renames in place of an exchange", old, lambda: replaced(Disk, "exchange", by_two_renames))
    yield Planted("the old checkpoint is removed first", old, lambda: replaced(Disk, "exchange", by_removal))
    yield Planted("latest is written in place", new, lambda: replaced(folder, "replace_file", in_place))
    yield Planted("latest leads the data", new, lambda: replaced(NewFolder, "publish", first_latest))
    yield Planted("a manifest comes first", new, lambda: replaced(NewFolder, "publish", under_its_name))
    yield Planted("unfinished folders stay", new, lambda: replaced(folder, "_unfinished", lambda directory: ()))
    yield Planted("an old checkpoint is removed under its name", "removals",
                  lambda: replaced(saved_run, "remove_checkpoint", by_files))  # fmt: skip
    yield Planted("an export is written under its name", "exports", written_in_place)
    yield Planted("files are not synced", cut, lambda: replaced(model.ModelledDisk, "sync", nothing))
    yield Planted("folders are not synced", cut, lambda: replaced(model.ModelledDisk, "sync_folder", nothing))
    yield Planted("what was replaced is removed before its name is synced", "power cuts, the tag that exists",
                  lambda: replaced(NewFolder, "make_name_durable", unsynced))  # fmt: skip
    later = "power cuts beside training, a new tag"
    for case in ("random instants of training", later):
        yield Planted(f"a background save copies nothing ({case})", case, copying_nothing)
    yield Planted("a background save syncs no folder", later,
                  lambda: replaced(model.ModelledDisk, "sync_folder", nothing))  # fmt: skip


@contextlib.contextmanager
def written_in_place() -> Iterator[None]:
    """New folders have their final name from the beginning."""
    original = NewFolder.__init__

    def named(self: NewFolder, disk_: Disk, target: Path, token: str) -> None:
        original(self, disk_, target, token)
        self.path = target

    def nothing(self: NewFolder) -> None:
        pass

    with contextlib.ExitStack() as held:
        for name, value in (("__init__", named), ("publish", nothing), ("discard", nothing)):
            held.enter_context(replaced(NewFolder, name, value))
        yield


@contextlib.contextmanager
def copying_nothing() -> Iterator[None]:
    """Saves beside training read values when the thread writes them."""
    from patrickstar.checkpoint.snapshot import Snapshot
    from patrickstar.state import later_saves

    def without_copies(source: Any, memory: Any, offsets: Any) -> Snapshot:
        taken = Snapshot(memory)
        taken.copied += [dataclasses.replace(shard, copies=None) for shard in source.shards()]
        return taken

    with replaced(later_saves, "take_snapshot", without_copies):
        yield


PROOF = Proof(
    name="crash",
    claim="Whenever the process is killed or the power is cut, each name leads to a complete checkpoint, old or new.",
    points="kills and power cuts",
    cases=[
        *(
            Case(f"saves under {name}, {ranks} rank{'s' * (ranks > 1)}", system_calls(tag, others, ranks))
            for name, tag, others in (
                ("a new tag", "new", []),
                ("the tag that exists", "old", []),
                ("one tag of two", "old", ["other"]),
            )
            for ranks in (1, 2)
        ),
        Case("exports", exports),
        Case("removals", removals),
        Case("power cuts, a new tag", power_cuts("new", [])),
        Case("power cuts, the tag that exists", power_cuts("old", [])),
        Case("power cuts, one tag of two", power_cuts("old", ["other"])),
        Case("power cuts beside training, a new tag", power_cuts_beside_training("new")),
        Case("power cuts beside training, the tag that exists", power_cuts_beside_training("old")),
        Case("random instants of training", random_instants),
    ],
    planted=list(planted()),
    environment=lambda: preload(SOURCE),
)

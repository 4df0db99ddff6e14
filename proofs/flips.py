"""prove-flips: one bit, byte or block of what was saved changes, or a file loses its end.

Each change must be refused: by `verify`, which reads everything, and by the call that reads the bytes. The message must
name the file; for a tensor's bytes the tensor too. Also changed: the file of optimizer states that rest on a disk, and
messages between processes, changed ones and (proofs/messages.py) ones that were not sent next.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from patrickstar import _C, CheckpointError, DiskError, StateError
from patrickstar.checkpoint import Checkpoint, SaveOptions, folder, latest_tag, manifest, reader, save
from patrickstar.ranks import authenticated
from proofs import messages as foreign
from proofs.cases import Case, Planted, Points, Proof, Setting, replaced
from proofs.faulty_calls import SOURCE, Calls, Fault, How, failing
from proofs.planted_io import AlwaysRight
from proofs.preloaded import preload
from proofs.training import Run, in_8_bits, on_disk, trained
from tests.bits import first_difference
from tests.checkpoint import test_damage
from tests.checkpoint.ranks import HeldSource

Change = Callable[[bytes, random.Random], Iterator[tuple[str, bytes]]]


def every_byte(data: bytes, chooser: random.Random) -> Iterator[tuple[str, bytes]]:
    """One random bit of each byte."""
    for position in range(len(data)):
        bit = chooser.randrange(8)
        yield (
            f"bit {bit} of byte {position}",
            data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :],
        )


def random_blocks(data: bytes, chooser: random.Random) -> Iterator[tuple[str, bytes]]:
    """Ranges that are zero, that are random, or that hold another range's bytes."""
    while True:
        size = min(chooser.choice((2, 3, 8, 64, 512, 4096)), len(data))
        begin, other = chooser.randrange(len(data) - size + 1), chooser.randrange(len(data) - size + 1)
        new = chooser.choice((bytes(size), chooser.randbytes(size), data[other : other + size]))
        changed = data[:begin] + new + data[begin + size :]
        if changed != data:
            yield f"{size} bytes from {begin}", changed


def every_length(data: bytes, chooser: random.Random) -> Iterator[tuple[str, bytes]]:
    """All shorter lengths, in random order, and a longer one."""
    yield "a byte more", data + b"\0"
    for size in chooser.sample(range(len(data)), len(data)):
        yield f"{size} bytes", data[:size]


def named(path: Path, position_of: str, said: str) -> str | None:
    """A complaint unless the message names the file."""
    return None if path.name in said or path.parent.name in said else f"{position_of}: the file is not named: {said}"


def engines(path: Path) -> Path:
    """The checkpoint of an engine."""
    run = in_8_bits()
    run.steps(0, 1)
    saved = run.engine.save_checkpoint(path, "t", {"epoch": 1})
    run.close()
    return saved


def small(path: Path) -> Path:
    """A checkpoint of few bytes, in several files."""
    options = SaveOptions(max_file_bytes=400)
    return save(path, "t", HeldSource(test_damage.TENSORS, 0), {"answer": 42}, options)


def verified(saved: Callable[[Path], Path], change: Change) -> Callable[[Setting], Points]:
    """Points: changes of each file of a checkpoint, found by ``verify``."""

    def points(setting: Setting) -> Points:
        path, chooser = saved(setting.folder), random.Random(setting.seed)
        contents = {file: file.read_bytes() for file in sorted(path.iterdir())}
        changes = {file: change(data, chooser) for file, data in contents.items()}
        while changes:
            for file in list(changes):
                found = next(changes[file], None)
                if found is None:
                    del changes[file]
                    continue
                what, data = found
                setting.note(f"{what} of {file.name}")
                file.write_bytes(data)
                try:
                    with Checkpoint(path) as checkpoint:
                        checkpoint.verify()
                    yield f"{what} of {file.name} changed: it verifies"
                except CheckpointError as error:
                    yield named(file, what, str(error))
                file.write_bytes(contents[file])

    return points


def loaded(setting: Setting) -> Points:
    """Points: changed bytes of a checkpoint that an engine loads; the engine trains no more until it has loaded one."""
    run, chooser = in_8_bits(), random.Random(setting.seed)
    run.steps(0, 1)
    path = run.engine.save_checkpoint(setting.folder, "t")
    expected = run.state()
    contents = {file: file.read_bytes() for file in sorted(path.iterdir())}
    for number in itertools.count():
        file = chooser.choice(list(contents))
        what, data = next(
            random_bits(contents[file], chooser) if number % 2 else random_blocks(contents[file], chooser)
        )
        setting.note(f"{what} of {file.name}")
        run.step(1)
        before = run.state()
        file.write_bytes(data)
        complaint = None
        try:
            run.engine.load_checkpoint(setting.folder)
            complaint = f"{what} of {file.name} changed: it is loaded"
        except CheckpointError as error:
            complaint = named(file, what, str(error))
            try:
                run.engine(next_batch())
                complaint = complaint or first_difference(run.state(), before, "the engine that loaded nothing")
                run.optimizer.zero_grad()
            except StateError as refused:
                complaint = complaint or (None if "mixed state" in str(refused) else f"{refused}")
        file.write_bytes(contents[file])
        run.engine.load_checkpoint(setting.folder)
        yield complaint or first_difference(run.state(), expected, "the checkpoint loaded afterwards")


def next_batch() -> Any:
    """Tokens of a forward without a backward."""
    import torch

    return torch.zeros(1, 4, dtype=torch.long)


def random_bits(data: bytes, chooser: random.Random) -> Iterator[tuple[str, bytes]]:
    """Single random bits."""
    while True:
        place = chooser.randrange(8 * len(data))
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        yield f"bit {place % 8} of byte {place // 8}", bytes(changed)


def latest(setting: Setting) -> Points:
    """Points: changes of the file ``latest``, beside tags that differ from the right one in a bit."""
    run, chooser = Run(), random.Random(setting.seed)
    for tag in ("step0", "step2", "step3", "step5", "step9", "stdp1", "step1"):
        run.engine.save_checkpoint(setting.folder, tag)
    run.close()
    file = setting.folder / "latest"
    data = file.read_bytes()
    bits = ((f"bit {place}", bytes(changed)) for place in range(8 * len(data)) for changed in [flipped(data, place)])
    for what, changed in itertools.chain(
        bits, every_length(data, chooser), itertools.islice(random_blocks(data, chooser), 2000)
    ):
        setting.note(what)
        file.write_bytes(changed)
        try:
            tag = latest_tag(setting.folder)
            # The tag alone, or the tag and a line's end: the form of older versions.
            is_old_form = data.startswith(changed) and len(changed) in (len("step1"), len("step1\n"))
            yield None if is_old_form and tag == "step1" else f"{what} changed: latest is {tag}"
        except CheckpointError as error:
            yield named(file, what, str(error))


def flipped(data: bytes, place: int) -> bytes:
    """``data`` with another bit at ``place``."""
    changed = bytearray(data)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def disk_states(setting: Setting) -> Points:
    """Points: reads of optimizer states that come back with a wrong bit, and writes that a disk loses."""
    options = on_disk(setting.folder / "disk")
    expected = trained(5)
    lost = Fault("a lost write", Calls.WRITE, How.LOSE)
    for number in itertools.count():
        run = Run(options)
        run.steps(0, 2)
        setting.note(f"piece {number}")
        try:
            if number % 2:
                run.engine._session.runtime.disk_faults.reads_before_flip = number // 2 % 40
                run.steps(2, 5)
                run.engine._session.runtime.disk_faults.reads_before_flip = -1
            else:
                with failing(lost, setting.folder / "disk", 1 + number // 2 % 40):
                    run.steps(2, 5)
            # The piece was written again before it was read, or not read.
            yield first_difference(run.state(), expected, "the run")
        except DiskError as error:
            yield None if "CRC-32C" in str(error) else f"{error}"
        with contextlib.suppress(DiskError):
            run.close()


def messages(setting: Setting) -> Points:
    """Points: changed messages between processes of an elastic run, whose connection then ends."""
    chooser = random.Random(setting.seed)
    key = chooser.randbytes(32)
    while True:
        content = chooser.randbytes(chooser.randrange(1, 300))
        data = sealed(key, content)
        assert opened(key, data) == content
        kind = chooser.choice((random_bits, random_blocks))
        what, changed = next(kind(data, chooser))
        setting.note(what)
        try:
            opened(key, changed)
            yield f"{what} changed: the message is taken"
        except Exception as error:
            yield (
                None
                if isinstance(error, (ConnectionError, OSError, ValueError))
                else f"{type(error).__name__}: {error}"
            )


def sealed(key: bytes, content: bytes) -> bytes:
    """The bytes of a message on their way."""
    near, far = socket.socketpair()
    with near, far:
        authenticated.AuthenticatedConnection(near, key, key, foreign.MOST_BYTES).send(content)
        return far.recv(foreign.MOST_BYTES)


def opened(key: bytes, data: bytes) -> bytes:
    """The content that a receiver takes; the connection then ends."""
    near, far = socket.socketpair()
    with far:
        near.sendall(data)
        near.close()
        return authenticated.AuthenticatedConnection(far, key, key, foreign.MOST_BYTES).receive(5)


def planted() -> Iterator[Planted]:
    """Bugs in what checks bytes."""
    by_verify, by_load = "each byte, found by verify", "bits and blocks, found by a load"
    yield Planted("checksums of tensors are not compared", by_verify, lambda: replaced(reader, "_C", AlwaysRight()))
    yield Planted("a load does not compare checksums", by_load, lambda: replaced(reader, "_C", AlwaysRight()))
    yield Planted("the manifest's checksum is not compared", by_verify, unchecked_manifest)
    yield Planted(
        "headers and sizes are not looked at",
        "lengths, found by verify",
        lambda: replaced(Checkpoint, "_check_file", nothing),
    )
    yield Planted("latest has no checksum", "latest", lambda: replaced(folder, "_tag_in", trusting))
    yield Planted("messages have no tag", "messages", lambda: replaced(authenticated, "_message_tag", constant_tag))
    yield from foreign.planted()
    yield Planted("an engine with half of a checkpoint trains on", by_load, accepting)


def nothing(*_: object) -> None:
    """Does nothing."""


def trusting(data: bytes, present: Any) -> str:
    """The tag of a file ``latest``, unchecked."""
    return data.partition(b"\n")[0].decode()


def constant_tag(*_: object) -> bytes:
    """The same for all messages."""
    return bytes(32)


@contextlib.contextmanager
def unchecked_manifest() -> Iterator[None]:
    """The manifest's own checksum is made right before it is compared."""
    original = manifest.Manifest.from_bytes

    def from_bytes(data: bytes) -> manifest.Manifest:
        begin, end = len(manifest._PREFIX) + 8 + len(manifest._MIDDLE), len(data) - len(manifest._SUFFIX)
        body = data[begin:end]
        right = f"{_C.crc32c(body):08x}".encode()
        return original(manifest._PREFIX + right + manifest._MIDDLE + body + manifest._SUFFIX)

    with replaced(manifest.Manifest, "from_bytes", staticmethod(from_bytes)):
        yield


@contextlib.contextmanager
def accepting() -> Iterator[None]:
    """Nothing breaks an engine up."""
    from patrickstar.session.wholeness import Wholeness

    with replaced(Wholeness, "break_up", nothing):
        yield


PROOF = Proof(
    name="flips",
    claim="Bytes that changed after they were saved, kept on a disk or sent are refused, naming the file or the array.",
    points="changes",
    cases=[
        Case("each byte, found by verify", verified(small, every_byte)),
        Case("lengths, found by verify", verified(small, every_length)),
        Case("random bits, found by verify", verified(engines, random_bits)),
        Case("random blocks, found by verify", verified(engines, random_blocks)),
        Case("bits and blocks, found by a load", loaded),
        Case("latest", latest),
        Case("optimizer states on a disk", disk_states),
        Case("messages", messages),
        *foreign.CASES,
    ],
    planted=list(planted()),
    environment=lambda: preload(SOURCE),
)

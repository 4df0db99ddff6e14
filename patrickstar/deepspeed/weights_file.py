"""A model's 16-bit weights in one file: all ranks read parameter by parameter, the first writes.

The file appears when it is complete. Additional memory: one whole parameter. For PyTorch's format also the 16-bit copy
on the first rank, since that format puts all values after a pickle of all tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from torch import nn

from patrickstar import _C
from patrickstar.checkpoint.disk import Disk, make_folders, naming, write_all
from patrickstar.checkpoint.memory import bytes_of
from patrickstar.checkpoint.peers import phase
from patrickstar.checkpoint.safetensors_format import FileTensor, make_header
from patrickstar.module.chunked_parameter import ChunkedParameter
from patrickstar.session.session import Session
from patrickstar.state.rank_peers import RankPeers


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    """A tensor of the file."""

    names: list[str]
    """Its names, in ``state_dict`` order; tied weights have several."""
    held: torch.Tensor
    """The module's parameter or buffer that has the values."""
    dtype: torch.dtype
    """The dtype of the values in the file."""


def save_16bit_weights(session: Session, path: Path, *, with_frozen: bool, disk: Disk | None = None) -> None:
    """See ``TrainingEngine.save_16bit_model``.

    Raises:
        CheckpointError: on all ranks, if the first cannot write; an existing file is unchanged.
        StateError: the model is tensor-parallel.
    """
    session.check_whole()
    _check_unsharded(session)
    peers = RankPeers(session.ranks.control)
    entries = _entries(session.module, _stored_dtype(session), with_frozen=with_frozen)
    what = f"{path} was not saved"
    format_of = _SafetensorsContent if path.suffix == ".safetensors" else _TorchContent
    with contextlib.ExitStack() as held:
        content: _Content | None = None
        with phase(peers, what):
            if peers.rank == 0:
                content = format_of(held.enter_context(_PartialFile(path.absolute(), disk or Disk())), entries)
        failure: Exception | None = None
        with session.guard("save_16bit_model"):
            for entry in entries:
                values = _read(session, entry)
                if content is not None and failure is None:
                    try:
                        content.add(entry, values)
                    # the other ranks keep reading with this one; the error is reported below
                    except Exception as error:
                        failure = error
                del values
        with phase(peers, what):
            if failure is not None:
                raise failure
            if content is not None:
                content.finish()


def read_16bit_weights(session: Session, *, with_frozen: bool) -> dict[str, torch.Tensor] | None:
    """The module's ``state_dict`` in 16 bits, on the first rank's CPU; None on the others. All ranks must call it."""
    session.check_whole()
    _check_unsharded(session)
    is_first = session.ranks.control.rank == 0
    entries = _entries(session.module, _stored_dtype(session), with_frozen=with_frozen)
    values: dict[str, torch.Tensor] = {}
    with session.guard("read_16bit_weights"):
        session.ranks.meet()
        for entry in entries:
            read = _read(session, entry)
            if is_first:
                with _C.HostAllocations():
                    values.update(dict.fromkeys(entry.names, read.to(entry.dtype)))
            del read
    return values if is_first else None


def _check_unsharded(session: Session) -> None:
    if session.matrices.names is not None:
        raise _C.StateError(
            "with tensor_parallel this rank has blocks of the model's weights; write whole ones with "
            "engine.export_weights(folder, dtype=torch.bfloat16), or read them by engine.state_dict()"
        )


def _stored_dtype(session: Session) -> torch.dtype:
    compute = session.config.compute_dtype
    return torch.bfloat16 if compute == torch.float32 else compute


def _entries(module: nn.Module, dtype: torch.dtype, *, with_frozen: bool) -> list[_Entry]:
    params = dict(module.named_parameters(remove_duplicate=False))
    entries: dict[int, _Entry] = {}
    for name, held in module.state_dict(keep_vars=True).items():
        param = params.get(name)
        if not isinstance(held, torch.Tensor) or (param is not None and not (param.requires_grad or with_frozen)):
            continue
        as_it_is = not isinstance(param, ChunkedParameter)
        entry = _Entry(names=[], held=held, dtype=held.dtype if as_it_is else dtype)
        entries.setdefault(id(held), entry).names.append(name)
    return list(entries.values())


def _read(session: Session, entry: _Entry) -> torch.Tensor:
    """The whole tensor, on the CPU. All ranks must call it for chunked parameters."""
    if isinstance(entry.held, ChunkedParameter):
        return session.states.value(entry.held)
    with _C.HostAllocations():
        return entry.held.detach().cpu()


class _PartialFile:
    """A temporary file beside ``path`` that replaces it when complete, and is removed otherwise."""

    def __init__(self, path: Path, disk: Disk):
        self._path, self._disk = path, disk
        self._partial = path.with_name(f".{path.name}.partial")
        self._fd = -1

    def __enter__(self) -> _PartialFile:
        make_folders(self._disk, self._path.parent)
        self._remove()  # left by a save that was killed
        self._fd = self._disk.create(self._partial)
        return self

    def write(self, data: bytes | memoryview) -> int:
        """Appends all of ``data``, and returns its length."""
        try:
            write_all(self._disk, self._fd, memoryview(data))
        except OSError as error:
            raise naming(error, self._partial) from error
        return len(data)

    def finish(self) -> None:
        """Syncs the file to the disk, and renames it."""
        try:
            self._disk.sync(self._fd)
            self._close()
        except OSError as error:
            raise naming(error, self._partial) from error
        self._disk.rename(self._partial, self._path)
        self._disk.sync_folder(self._path.parent)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._disk.close(fd)

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove_file(self._partial)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # the error inside has the same cause
            self._close()
        with contextlib.suppress(OSError):
            self._remove()


class _Content(Protocol):
    """Content of the file; entries are added in order."""

    def __init__(self, file: _PartialFile, entries: Sequence[_Entry]): ...

    def add(self, entry: _Entry, values: torch.Tensor) -> None:
        """Adds the values of the next entry."""

    def finish(self) -> None:
        """Completes the file after the last entry."""


class _SafetensorsContent:
    """Safetensors: each tensor once, under its first name, written as it is added."""

    def __init__(self, file: _PartialFile, entries: Sequence[_Entry]):
        self._file = file
        file.write(
            make_header(
                [
                    FileTensor(
                        key=entry.names[0],
                        dtype=entry.dtype,
                        shape=tuple(entry.held.shape),
                        num_bytes=entry.held.numel() * entry.dtype.itemsize,
                    )
                    for entry in entries
                ]
            )
        )

    def add(self, entry: _Entry, values: torch.Tensor) -> None:
        """Appends the values, converted to the entry's dtype."""
        with _C.HostAllocations():
            stored = values.to(entry.dtype).contiguous()
        self._file.write(bytes_of(stored))

    def finish(self) -> None:
        """Renames the file; its header was written first."""
        self._file.finish()


class _TorchContent:
    """PyTorch's format: a ``state_dict`` with all names."""

    def __init__(self, file: _PartialFile, entries: Sequence[_Entry]):
        self._file = file
        self._values: dict[str, torch.Tensor] = {
            name: torch.empty(0, device="cpu") for entry in entries for name in entry.names
        }
        self._failure: OSError | None = None

    def add(self, entry: _Entry, values: torch.Tensor) -> None:
        """Keeps the values, converted to the entry's dtype, until :meth:`finish` writes them."""
        with _C.HostAllocations():
            values = values.to(entry.dtype)
        for name in entry.names:
            self._values[name] = values

    def write(self, data: bytes) -> int:
        """Called by PyTorch, which continues after an error and then raises another."""
        if self._failure is None:
            try:
                return self._file.write(data)
            except OSError as error:
                self._failure = error
        return len(data)

    def flush(self) -> None:
        """Does nothing; ``torch.save`` calls it."""

    def finish(self) -> None:
        """Writes the pickle, then all values."""
        torch.save(self._values, self)
        if self._failure is not None:
            raise self._failure
        self._file.finish()

"""Loads pickled files of other programs without running or importing anything that they name.

Files of ``torch.save`` go through PyTorch's ``weights_only`` unpickler, which knows a fixed list of opcodes and
functions. Classes that it does not know become stand-ins. ``.metadata`` of torch.distributed.checkpoint is an ordinary
pickle: only the opcodes and the classes listed here are read.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from patrickstar import _C
from patrickstar.checkpoint.errors import CheckpointError

_MAX_METADATA_BYTES = 2**30
_PLAIN_CLASSES = frozenset(
    {
        "argparse.Namespace",
        "builtins.getattr",  # pickled enums of some versions of Python; the stand-in returns nothing of an object
        "collections.deque",
        "datetime.datetime",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "types.SimpleNamespace",
    }
)
"""Names of the standard library that trainers' own state contains; a file with any other name is refused."""
_PLAIN_OPCODES = frozenset(
    {
        *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"),
    }
)


class StandIn:
    """Takes the place of an object whose class is not loaded, and drops its state."""

    def __init__(self, *args: Any, **kwargs: Any):
        """Takes any arguments."""

    def __setstate__(self, state: Any) -> None:
        """Takes any state."""


def load_file(path: Path) -> Any:
    """The content of a ``torch.save`` file. Tensors are mapped from the file, not copied.

    Raises:
        CheckpointError: the file is missing or damaged, or its pickle names functions that no checkpoint needs.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; copy the whole folder, or load another checkpoint")
    return _reading(path, lambda: _load(path, mmap=True))


def load_bytes(data: bytes, path: Path) -> Any:
    """The content of a ``torch.save`` file that lies within the file ``path``. Raises CheckpointError."""
    return _reading(path, lambda: _load(io.BytesIO(data), mmap=False))


def load_metadata(path: Path, classes: Mapping[str, Any]) -> Any:
    """The content of an ordinary pickle that names only ``classes``.

    Args:
        path: the file.
        classes: by "module.name".

    Raises:
        CheckpointError: the file is damaged, or names something else.
    """

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" not in classes:
                raise _refused(path, f"{module}.{name}")
            return classes[f"{module}.{name}"]

    def load() -> Any:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise CheckpointError(f"{path} has more than {_MAX_METADATA_BYTES} bytes")
        data = path.read_bytes()
        for opcode, _, _ in pickletools.genops(data):
            if opcode.name not in _PLAIN_OPCODES:
                raise _refused(path, f"the opcode {opcode.name}")
        return Unpickler(io.BytesIO(data)).load()

    return _reading(path, load)


def _load(source: Path | io.BytesIO, mmap: bool) -> Any:
    names = get_unsafe_globals_in_checkpoint(source)
    stand_ins = [_stand_in(source, name) for name in names]
    if isinstance(source, io.BytesIO):
        source.seek(0)
    with safe_globals(stand_ins), _C.HostAllocations():
        return torch.load(source, map_location="cpu", mmap=mmap or None, weights_only=True)


def _stand_in(source: Any, full_name: str) -> type:
    if full_name.partition(".")[0] in (*sys.stdlib_module_names, "__builtin__") and full_name not in _PLAIN_CLASSES:
        raise _refused(source if isinstance(source, Path) else None, full_name)
    module, _, name = full_name.rpartition(".")
    return type(name, (StandIn,), {"__module__": module, "__qualname__": name})


def _refused(path: Path | None, name: str) -> CheckpointError:
    where = "" if path is None else f"{path}: "
    return CheckpointError(
        f"{where}its pickle names {name[:200]}, which no checkpoint needs: it was refused and nothing of it was run; "
        "do not use the file"
    )


def _reading(path: Path, load: Callable[[], Any]) -> Any:
    """Calls ``load``; any exception becomes a CheckpointError that names the file."""
    try:
        return load()
    except CheckpointError as error:
        raise error if str(path) in str(error) else CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # a damaged or hostile file may raise any
        reason = (str(error).splitlines() or [""])[0][:300]
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {reason}); it is damaged or incomplete: copy it again, or "
            "load another checkpoint"
        ) from error

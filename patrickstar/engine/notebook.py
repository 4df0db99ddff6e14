"""A notebook's cell that is run again: the engine that it made before is closed before it makes another one.

[Note: a cell that is run again] Python binds a name anew when the call has returned, so that the engine of the earlier
run would still be open beside the new one, with all of its memory. It is closed first if all of this holds:

* IPython runs the code, and the earlier engine was made by another run of a cell;
* the statement that made it is the one that runs now, but for constants (a cell whose budget was edited is the same);
* nothing but names which that statement assigns leads to the engine, and none that it does not mention is the module's.

So a teacher and a student stay open which one cell makes in a loop, or two cells, or whose engines are kept in a list.
"""

from __future__ import annotations

import dataclasses
import dis
import gc
import inspect
import logging
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from patrickstar.engine.open_session import open_sessions

if TYPE_CHECKING:
    from patrickstar.engine.session import Session

logger = logging.getLogger("patrickstar")


@dataclasses.dataclass(frozen=True)
class CellStatement:
    """A statement at the top of a notebook's cell, in one run of the cell."""

    mentioned: tuple[str, ...]
    """The names in its code, those of functions defined within it included: its constants are not compared."""
    run: int
    """IPython's count of cells that were run."""

    def repeats(self, earlier: CellStatement | None) -> bool:
        """Whether the same statement ran earlier, in another run of a cell."""
        return earlier is not None and earlier.mentioned == self.mentioned and earlier.run != self.run


def running_statement() -> CellStatement | None:
    """That of a cell within which this is called; None outside of IPython."""
    shell = _shell()
    code = None if shell is None else _running_code(shell)
    return None if code is None else CellStatement(tuple(_mentioned(code)), shell.execution_count)


def close_engine_of_cell() -> None:
    """Closes the engine that the running cell made when it was run before ([Note: a cell that is run again])."""
    statement = running_statement()
    if statement is None:
        return
    for session in open_sessions():
        face = session.owner.face
        if face is not None and statement.repeats(session.owner.made_by) and len(session.ranks.members) == 1:
            _close_unless_kept(session, face, statement)


def _close_unless_kept(session: Session, face: Callable[[], Any], statement: CellStatement) -> None:
    shell = _shell()
    names, code = shell.user_ns, _running_code(shell)
    assigned = {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_NAME", "STORE_GLOBAL")}
    held_by = sorted(name for name in assigned if name in names and names[name] is face())
    others = (value for name, value in names.items() if name not in statement.mentioned)
    if not held_by or any(value is session.module for value in others):
        return
    _forget_last_error()
    for name in held_by:
        del names[name]
    gc.collect()
    engine = face()
    if engine is not None:  # something else leads to it
        names.update(dict.fromkeys(held_by, engine))
        return
    logger.info("the engine that %s was is closed, since its cell is run again", " and ".join(held_by))
    session.closing.close()


def _forget_last_error() -> None:
    """The frames in which the last cell that failed was: their variables would lead to the engine."""
    error = getattr(sys, "last_value", None)
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            _ = frame.f_locals  # who printed the traceback has made a dict of them, which follows when it is read
        error = error.__cause__ or error.__context__


def _shell() -> Any:
    package = sys.modules.get("IPython")
    return None if package is None else package.get_ipython()


def _running_code(shell: Any) -> types.CodeType | None:
    """Of the statement of a cell that is running; each is compiled by itself."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
        if frame.f_globals is shell.user_ns and not is_function:
            return frame.f_code
        frame = frame.f_back
    return None


def _mentioned(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from (*constant.co_varnames, *_mentioned(constant))

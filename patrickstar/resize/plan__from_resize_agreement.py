"""Old ranks of a resize tell each other what they have, and whether they can go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from patrickstar import _C
from patrickstar.elastic.rendezvous import ResizeError
from patrickstar.engine.rank_sync import failed_ranks
from patrickstar.engine.session import Session
from patrickstar.ranks.failures import is_interrupt


@contextlib.contextmanager
def all_or_none(session: Session, what: str) -> Iterator[None]:
    """Where what is inside fails on a rank with an error, all ranks raise ResizeError and can go on. A rank that was
    interrupted raises the interrupt itself.
    """
    failure: BaseException | None = None
    try:
        yield
    except (_C.RankFailure, GeneratorExit):
        raise
    except BaseException as error:
        failure = error
    try:
        with session.guard("resize"):
            failed = failed_ranks(session.ranks, failure)
    except Exception as error:
        if failure is not None and is_interrupt(failure):
            raise failure from error
        raise
    if failure is not None and is_interrupt(failure):
        raise failure
    if failed:
        raise ResizeError(f"{what}, and the ranks are as they were: {failed}") from failure


def together(session: Session, said: str) -> list[bytes]:
    """What each old rank says, by rank."""
    if len(session.ranks.members) == 1:
        return [said.encode()]
    with session.guard("resize"):
        return session.ranks.control.exchange(said.encode(), "the resize")

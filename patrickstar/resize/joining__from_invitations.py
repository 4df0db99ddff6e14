"""The leader's message to a process that joins, checked before the process acts on it: types and ranges of all fields,
a token that is part of a path, and hosts within the run's networks. The message names no path on this machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from patrickstar.elastic.rendezvous import ResizeError
from patrickstar.elastic.resize_folder import is_token
from patrickstar.engine.resize_plan import ResizePlan
from patrickstar.ranks.addresses import AllowedHosts, split_address

REFUSAL = "refusal"
"""The key of a message in an invitation's place: no invitation comes, for this reason."""
_MOST = 2**63 - 1
_MOST_RANKS = 2**20
_MOST_NAME = 255
_Check = Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Invitation:
    """To one process, with which it can join."""

    plan: ResizePlan
    addresses: list[str]
    """``host:port`` of the old ranks' file servers, by rank; "": a rank has none."""


def read_invitation(said: Mapping[str, Any], number: int, allowed: AllowedHosts) -> Invitation:
    """The invitation of process ``number``.

    Raises:
        ResizeError: the ranks that train refuse the process, or a field is missing, unknown, or has a value that it
            must not have.
    """
    if REFUSAL in said:
        raise ResizeError(f"this process did not join: {said[REFUSAL]}")
    try:
        fields, addresses = dict(said["plan"]), said["addresses"]
        _check_names(fields)
        for name, check in _CHECKS.items():
            if not check(fields[name]):
                raise ValueError(f"{name} is {repr(fields[name])[:100]}")
        plan = ResizePlan(**fields)
        _check_ranks(plan, number)
        allowed.check(plan.host)
        if not _list_of(_is_text)(addresses) or len(addresses) != plan.num_old:
            raise ValueError(f"addresses are {str(addresses)[:100]}")
        for address in filter(None, addresses):
            allowed.check(split_address(address)[0])
    except (ValueError, KeyError, TypeError) as error:
        raise ResizeError(
            f"this process did not join: the invitation is refused ({type(error).__name__}: {error}); start it with "
            "the version of PatrickStar of the ranks that train"
        ) from error
    return Invitation(plan, addresses)


def _check_names(fields: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(ResizePlan)}
    if fields.keys() != known:
        raise ValueError(f"unknown or missing fields: {', '.join(sorted(map(str, fields.keys() ^ known)))[:200]}")


def _check_ranks(plan: ResizePlan, number: int) -> None:
    joining = plan.former.count(None)
    if len(plan.hosts) != len(plan.former) or joining != len(plan.guests) or number not in plan.guests:
        raise ValueError(
            f"{len(plan.former)} ranks, of which {joining} join: {plan.guests}, on {len(plan.hosts)} hosts"
        )
    staying = [old for old in plan.former if old is not None]
    if len(set(staying)) != len(staying) or any(old >= plan.num_old for old in staying):
        raise ValueError(f"former ranks are {plan.former}")


def _is_number(least: int, most: int = _MOST) -> _Check:
    return lambda value: type(value) is int and least <= value <= most


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_NAME


def _list_of(check: _Check, most: int | None = None) -> _Check:
    return lambda value: isinstance(value, list) and (most is None or len(value) <= most) and all(map(check, value))


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


_CHECKS: dict[str, _Check] = {
    "token": is_token,
    "num_old": _is_number(1, _MOST_RANKS),
    "former": _list_of(_or_none(_is_number(0, _MOST_RANKS)), _MOST_RANKS),
    "guests": _list_of(_is_number(1), _MOST_RANKS),
    "hosts": _list_of(_is_text, _MOST_RANKS),
    "host": _is_text,
    "port": _is_number(1, 2**16 - 1),
    "chunk_numel": _is_number(1),
    "micro_batches": lambda value: isinstance(value, dict) and all(map(_is_number(1), value.values())),
    "accumulation": _or_none(_is_number(1)),
    "step_counts": _list_of(_is_number(0)),
    "num_chunks": _is_number(0),
    "timeline": lambda value: isinstance(value, str),
    "on_device": _list_of(_is_number(0)),
    "secret": lambda value: value == "",
}

"""In which order the ranks of one line multiply what they have and what comes: the only place that says so.

[Note: own first, own last] Where others' parts come to a rank, it multiplies its own first, while the next ones are on
their way, then those of the ranks behind it, round the line (:func:`arriving`); so its first product never waits, and
in every exchange each rank sends to one other and receives of one. Where sums go to their owners, it computes the
others' summands first, the next rank's before all, and its own last, on top of what came (:func:`scattered`), in pieces
of the output, so that the last message too is behind products. What is added up is added in one order, that of ranks
and then the own product, whatever comes first and whatever memory is left, so that it always has the same bits.

[Note: two products behind a message] A product that is on all multiprocessors of a GPU lets no message begin before it
ends, and a message that is ready when a product is, mostly comes second. So two products are computed between the
moment that a message may begin and the one that waits for it: sums have three pieces, a part is multiplied in two while
the next one comes, and what is gathered for pieces is begun for all of them at once.

[Note: few pieces] A message takes multiprocessors from the products beside it, each piece of a product leaves some idle
at its end, and each message waits for its launch. So nothing is cut finer than that takes. Where a rank needs a part of
everybody before it can begin, the first piece is small, since nothing hides it, and each one behind it at most three
times as large as the one whose product hides it (:data:`GROWING`). Pieces whose product would not fill a GPU are made
larger (:data:`_FILLING`): sizes decide, and all ranks have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from patrickstar.ranks.exchanges import PendingExchange
from patrickstar.tensor2d.lines import Line

Piece = TypeVar("Piece")

Shares = Sequence[tuple[int, ...]]
"""In which a dimension may be cut, the finest first; empty: not at all."""

GROWING: Shares = ((1, 3, 6, 6), (1, 3), (1, 1))
"""Shares of pieces of which the first is not hidden, from the finest cut on."""
BEFORE_OTHERS: Shares = ((1, 3), (1, 1))
"""Of the product of one rank's part while the next one's is on its way, which may begin behind the first piece."""
SUMS: Shares = ((1, 1, 1), (1, 1))
"""Of sums that go to their owners."""

_FILLING = 2**22
"""Elements of an output that keep a GPU busy: 128 tiles of 128 x 256, about as many as it has multiprocessors."""
_TILE = 128
"""Pieces of matrices are multiples of it where they can be: what one multiprocessor computes at a time."""


def is_filling(elements: int) -> bool:
    """Whether a product of so many elements is worth a launch of its own ([Note: few pieces])."""
    return elements >= _FILLING


def cut(size: int, width: int, choices: Shares, *, in_tiles: bool = True) -> list[slice]:
    """Cuts a dimension of an output into pieces ([Note: few pieces]).

    Args:
        size: of the dimension.
        width: elements of the output for each index of it.
        choices: of which the first one is taken whose smallest piece fills a GPU.
        in_tiles: whether pieces end at multiples of a tile; not where the dimension is one of samples.

    Returns:
        One piece or more, in order; together they are the dimension.
    """
    step = _TILE if in_tiles else 1
    for shares in choices:
        ends = [size * sum(shares[: index + 1]) // sum(shares) // step * step for index in range(len(shares) - 1)]
        pieces = [slice(begin, end) for begin, end in zip([0, *ends], [*ends, size], strict=True)]
        smallest = min(piece.stop - piece.start for piece in pieces)
        if smallest > 0 and is_filling(smallest * width):
            return pieces
    return [slice(0, size)]


def begin_gathering(
    mine: torch.Tensor, line: Line, into: Sequence[torch.Tensor] | None = None
) -> Callable[[], list[torch.Tensor]]:
    """Begins to gather a tensor of each rank, of one shape.

    Args:
        mine: contiguous.
        line: the ranks.
        into: where each rank's goes, contiguous, of which ``mine`` is there; None: new memory for those that come.

    Returns:
        What waits for them, and returns them by rank.
    """
    parts, pending = {line.rank: mine}, []
    for step in range(1, line.size):
        of = (line.rank + step) % line.size
        parts[of] = torch.empty_like(mine) if into is None else into[of]
        pending.append(line.swap_apart(-step, mine, parts[of], "panels"))

    def wait() -> list[torch.Tensor]:
        _wait_for(pending)
        return [parts[rank] for rank in range(line.size)]

    return wait


def arriving(mine: torch.Tensor, line: Line) -> Iterator[tuple[int, torch.Tensor, Shares]]:
    """Each rank, its tensor, of the shape of ``mine``, and how its product is cut, in the order of [Note: own first,
    own last].
    """
    if line.size > 1:
        mine = mine.contiguous()
        line.meet()
    here = mine
    for step in range(line.size):
        rank = (line.rank + step) % line.size
        if step + 1 == line.size:
            yield rank, here, ()
            return
        coming = torch.empty_like(mine)
        pending = line.swap_apart(-(step + 1), mine, coming, "panels")
        yield rank, here, BEFORE_OTHERS
        pending.wait()
        here = coming


def scattered(
    line: Line,
    pieces: Sequence[Piece],
    summand: Callable[[int, Piece], torch.Tensor],
    target: Callable[[Piece], torch.Tensor],
    add_own: Callable[[Piece, list[torch.Tensor]], None],
) -> None:
    """Sums over ranks of which each keeps its own ([Note: own first, own last], [Note: sums by their owner]).

    Args:
        line: the ranks.
        pieces: of what each rank keeps.
        summand: of the piece of one owner, this rank's; contiguous.
        target: where this rank keeps a piece; contiguous.
        add_own: adds this rank's own product of a piece to the others' summands of it, in the order of ranks, and
            leaves the sum in the target. Of two ranks the other's summand lies there already.
    """
    begun: list[tuple[Piece, list[PendingExchange], list[torch.Tensor]]] = []
    for piece in pieces:
        pending, incoming = [], {}
        for step in range(1, line.size):
            theirs = summand((line.rank + step) % line.size, piece)
            if not begun and not pending:
                line.meet()
            sender = (line.rank - step) % line.size
            incoming[sender] = target(piece) if line.size == 2 else torch.empty_like(theirs)
            pending.append(line.swap_apart(step, theirs, incoming[sender], "partial sums"))
        begun.append((piece, pending, [incoming[rank] for rank in sorted(incoming)]))
    for piece, pending, parts in begun:
        _wait_for(pending)
        add_own(piece, parts)


def _wait_for(pending: list[PendingExchange]) -> None:
    """Lets go of each, and with it of what was sent."""
    while pending:
        pending.pop(0).wait()

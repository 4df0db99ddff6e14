"""Orders and piece sizes that overlap products with the messages of one mesh dimension.

[Note: own first, own last] With an all-gather (:func:`arriving`) a rank multiplies its own part first, while the next
one arrives, then those of the ranks after it, cyclically. So its first product never waits, and in each exchange a rank
sends to one other and receives from one. With a reduce-scatter (:func:`scattered`) it computes the others' summands
first, the next rank's before all. Its own product comes last, onto the received summands, in pieces of the output, so
that the last message overlaps too. Sums are always added in rank order and then the own product, so bits do not depend
on arrival or memory.

Two products run between the start of a message and the wait for it. A product that fills a GPU delays messages until it
ends, and a message that becomes ready together with a product usually comes second. So sums have three pieces, a part
is multiplied in two pieces while the next one arrives, and all-gathers for pieces all start at once.

Pieces are no finer than that needs: messages take multiprocessors from products, each piece leaves some idle at its
end, and each message waits for its launch. If a rank needs a part from every rank before it can begin, the first piece
is small, since nothing hides it. Each later piece is at most three times as large as the one that hides it
(:data:`GROWING`). Pieces too small to fill a GPU are enlarged (:data:`_FILLING`). Sizes alone decide, and all ranks
have the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from patrickstar.ranks.exchanges import PendingExchange
from patrickstar.tensor2d.lines import Line

Piece = TypeVar("Piece")

Shares = Sequence[tuple[int, ...]]
"""Shares into which a dimension may be cut, finest first; empty: not at all."""

GROWING: Shares = ((1, 3, 6, 6), (1, 3), (1, 1))
"""Shares of pieces whose first one is not hidden, finest first."""
BEFORE_OTHERS: Shares = ((1, 3), (1, 1))
"""Shares of one part's product while the next part arrives; the next message may start after the first piece."""
SUMS: Shares = ((1, 1, 1), (1, 1))
"""Shares of sums that go to their owners."""

_FILLING = 2**22
"""Output elements that fill a GPU: 128 tiles of 128 x 256, about as many as it has multiprocessors."""
_TILE = 128
"""Unit of pieces where possible: the tile that one multiprocessor computes at a time."""


def is_filling(elements: int) -> bool:
    """True if a product of so many output elements is worth its own launch."""
    return elements >= _FILLING


def cut(size: int, width: int, choices: Shares, *, in_tiles: bool = True) -> list[slice]:
    """Cuts a dimension of an output into pieces.

    Args:
        size: size of the dimension.
        width: output elements per index.
        choices: the first one whose smallest piece fills a GPU is taken.
        in_tiles: pieces end at multiples of a tile; not for a dimension of samples.

    Returns:
        one piece or more, in order, that cover the dimension.
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
    """Starts an all-gather of tensors of one shape.

    Args:
        mine: this rank's tensor, contiguous.
        line: the ranks.
        into: destination of each rank's tensor, contiguous; ``mine`` is in its own already. None: new memory.

    Returns:
        a function that waits and returns the tensors by rank.
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
    """Yields each rank, its tensor (of ``mine``'s shape) and the shares to cut its product into, in the order of [Note:
    own first, own last].
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
    """A reduce-scatter that overlaps with products ([Note: own first, own last], [Note: sums by their owner]).

    Args:
        line: the ranks.
        pieces: pieces of each rank's result.
        summand: this rank's summand for one owner's piece; contiguous.
        target: this rank's result for a piece; contiguous.
        add_own: adds this rank's own product to the others' summands of a piece, in rank order, and leaves the sum in
            the target. With two ranks the other's summand is in the target already.
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
    """Waits for each exchange and drops it, and with it the tensors sent."""
    while pending:
        pending.pop(0).wait()

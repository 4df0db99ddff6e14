"""Which keys a query may see, by their positions in the whole sequence."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import torch

from patrickstar.sequence.layout import Slice


class Cover(enum.Enum):
    """How much of a block of queries and keys is seen."""

    NONE = "nothing"
    ALL = "everything"
    DIAGONAL = "queries and keys are the same tokens, each sees those before and itself"
    SOME = "what the mask says"


@dataclasses.dataclass(frozen=True)
class Masking:
    """The rule. A query sees a key where all parts of it agree.

    Attributes:
        causal: keys before the query, and its own.
        window: how far back and forward of the query, in tokens; None: any way.
        documents: where the documents of a packed sequence begin, and its end (``cu_seqlens``); a query sees keys of
            its own document. None: one document.
        length: tokens before the padding at the end; None: there is none. Nobody sees padding, and it sees nobody: its
            outputs are 0, and so are its gradients.
    """

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    documents: tuple[int, ...] | None = None
    length: int | None = None

    def cover(self, queries: Slice, keys: Slice) -> Cover:
        """Of a block, without looking at each element."""
        back, forward = self._reach()
        nearest_back, farthest_back = queries.start - (keys.stop - 1), queries.stop - 1 - keys.start
        if (back is not None and nearest_back > back) or (forward is not None and -farthest_back > forward):
            return Cover.NONE
        if self.length is not None and max(queries.start, keys.start) >= self.length:
            return Cover.NONE
        if self.documents is not None:
            first, last = self._document(queries.start), self._document(queries.stop - 1)
            if self._document(keys.stop - 1) < first or self._document(keys.start) > last:
                return Cover.NONE
        is_one_document = self.documents is None or (
            self._document(min(queries.start, keys.start)) == self._document(max(queries.stop, keys.stop) - 1)
        )
        if not is_one_document or (self.length is not None and max(queries.stop, keys.stop) > self.length):
            return Cover.SOME
        if back is not None and farthest_back > back:
            return Cover.SOME
        if forward is None or -nearest_back <= forward:
            return Cover.ALL
        return Cover.DIAGONAL if self.causal and queries == keys else Cover.SOME

    def mask(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """True where a query sees a key: [queries, keys], of positions."""
        distance = queries[:, None] - keys
        seen = torch.ones_like(distance, dtype=torch.bool)
        back, forward = self._reach()
        if back is not None:
            seen &= distance <= back
        if forward is not None:
            seen &= -distance <= forward
        if self.documents is not None:
            begins = torch.tensor(self.documents[1:], device=queries.device)
            document = [torch.searchsorted(begins, part, right=True) for part in (queries, keys)]
            seen &= document[0][:, None] == document[1]
        if self.length is not None:
            seen &= (queries[:, None] < self.length) & (keys < self.length)
        return seen

    def _reach(self) -> tuple[int | None, int | None]:
        back, forward = self.window
        return back, 0 if self.causal else forward

    def _document(self, position: int) -> int:
        assert self.documents is not None
        return sum(begin <= position for begin in self.documents[1:])


def make_masking(
    *, causal: bool, window: tuple[int, int] | None, cu_seqlens: Sequence[int] | None, length: int, padded_length: int
) -> Masking:
    """Of what :func:`attention` takes. A window's -1 is no limit, as flash-attention has it.

    Raises:
        ValueError: a window below -1; ``cu_seqlens`` that do not rise from 0 to the length; a length beyond the tokens.
    """
    limits: tuple[int | None, int | None] = (None, None)
    if window is not None:
        if len(window) != 2 or min(window) < -1:
            raise ValueError(f"window is {window}; give how many tokens back and forward are seen, -1 for no limit")
        limits = (None if window[0] == -1 else window[0], None if window[1] == -1 else window[1])
    if not 0 < length <= padded_length:
        raise ValueError(f"length is {length}, but the ranks together have {padded_length} tokens; give 1 to that")
    documents = None
    if cu_seqlens is not None:
        documents = tuple(int(value) for value in cu_seqlens)
        rises = all(low < high for low, high in zip(documents, documents[1:], strict=False))
        if len(documents) < 2 or documents[0] != 0 or documents[-1] != length or not rises:
            shown = f"{list(documents[:4])}{'…' if len(documents) > 4 else ''}"
            raise ValueError(f"cu_seqlens is {shown}; it must rise from 0 to the length of the sequence, {length}")
    return Masking(causal, limits, documents, length if length < padded_length else None)

"""The keys that a query may see, by positions in the whole sequence."""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Sequence

import torch

from patrickstar.sequence.layout import Slice

_BEYOND = 2**62  # greater than every key's position


class Cover(enum.Enum):
    """How much of a block of queries and keys is seen."""

    NONE = "nothing"
    ALL = "everything"
    DIAGONAL = "queries and keys are the same tokens, each sees those before and itself"
    SOME = "what the mask says"


class Padding:
    """Real tokens of each sequence in a batch; padding may be anywhere.

    One object serves all layers of a step. Its constructor inspects the whole mask on the host, and so waits for the
    device if the mask is there.

        padding = Padding(batch["attention_mask"].bool())
        out = attention(q, k, v, group, padding=padding)

    Args:
        real: bool, [batch, tokens of the whole sequence].
        device: attention's compute device; None: that of ``real``. For other devices each attention copies it.

    Attributes:
        real: the mask on that device.

    Raises:
        ValueError: ``real`` is not bool, or not two-dimensional.
    """

    def __init__(self, real: torch.Tensor, device: torch.device | None = None):
        if real.dtype != torch.bool or real.dim() != 2:
            raise ValueError(
                f"padding is {list(real.shape)} of {real.dtype}; give bool, [batch, tokens of the whole sequence], "
                "True for real tokens"
            )
        self.real = real if device is None else real.to(device, non_blocking=True)
        on_host = real.cpu()
        self._with_padding = _counts_before(~on_host.all(dim=0))
        self._with_tokens = _counts_before(on_host.any(dim=0))

    def cover(self, queries: Slice, keys: Slice) -> Cover:
        """How much of a block padding leaves visible: NONE, SOME or ALL."""
        if self.is_all_of(queries) or self.is_all_of(keys):
            return Cover.NONE
        return Cover.SOME if self.is_in(queries) or self.is_in(keys) else Cover.ALL

    def mask(self, queries: Slice, keys: Slice, device: torch.device) -> torch.Tensor:
        """True where padding lets a query see a key: bool, [batch, queries, keys]."""
        return self._real(queries, device)[:, :, None] & self._real(keys, device)[:, None, :]

    def _real(self, part: Slice, device: torch.device) -> torch.Tensor:
        return self.real[:, part.start : part.stop].to(device)

    def is_in(self, part: Slice) -> bool:
        """True if some sequence has padding in this slice."""
        return bool(self._with_padding[part.stop] > self._with_padding[part.start])

    def is_all_of(self, part: Slice) -> bool:
        """True if no sequence has a real token in this slice."""
        return bool(self._with_tokens[part.stop] == self._with_tokens[part.start])


class KeyPadding(Padding):
    """Padding that is not seen but does see, as in Hugging Face models: its outputs are not 0."""

    def cover(self, queries: Slice, keys: Slice) -> Cover:
        """See :class:`Padding`; queries may be padding."""
        if self.is_all_of(keys):
            return Cover.NONE
        return Cover.SOME if self.is_in(keys) else Cover.ALL

    def mask(self, queries: Slice, keys: Slice, device: torch.device) -> torch.Tensor:
        """See :class:`Padding`; the queries' dimension has size 1."""
        return self._real(keys, device)[:, None, :]


def _counts_before(chosen: torch.Tensor) -> torch.Tensor:
    """Exclusive cumulative count: entries chosen before each index, and in all."""
    return torch.nn.functional.pad(chosen.long().cumsum(dim=0), (1, 0))


@dataclasses.dataclass(frozen=True, eq=False)
class Masking:
    """A query sees a key if all of these rules allow it.

    Attributes:
        causal: the query's own key and those before it.
        window: tokens before and after the query; None: no limit.
        documents: first tokens of a packed sequence's documents, and its end (``cu_seqlens``); a query sees keys of its
            own document. None: one document.
        length: tokens before the padding at the end; None: no padding. Padding neither sees nor is seen: its outputs
            and gradients are 0.
        padding: padding that differs between sequences; None: no padding.
    """

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    documents: tuple[int, ...] | None = None
    length: int | None = None
    padding: Padding | None = None

    def cover(self, queries: Slice, keys: Slice) -> Cover:
        """How much of a block is seen, computed from its bounds."""
        back, forward = self._reach()
        nearest_back, farthest_back = queries.start - (keys.stop - 1), queries.stop - 1 - keys.start
        if (back is not None and nearest_back > back) or (forward is not None and -farthest_back > forward):
            return Cover.NONE
        if self.length is not None and max(queries.start, keys.start) >= self.length:
            return Cover.NONE
        of_padding = Cover.ALL if self.padding is None else self.padding.cover(queries, keys)
        if of_padding is Cover.NONE:
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
        if of_padding is Cover.SOME:
            return Cover.SOME
        if back is not None and farthest_back > back:
            return Cover.SOME
        if forward is None or -nearest_back <= forward:
            return Cover.ALL
        return Cover.DIAGONAL if self.causal and queries == keys else Cover.SOME

    def mask(self, queries: Slice, keys: Slice, device: torch.device) -> torch.Tensor:
        """True where a query sees a key: bool, [queries, keys], with ``padding`` [batch, 1, queries, keys]."""
        places = torch.arange(keys.start, keys.stop, device=device)
        first, stop = self._keys_of(torch.arange(queries.start, queries.stop, device=device))
        seen = (places >= first[:, None]) & (places < stop[:, None])
        if self.padding is None:
            return seen
        return seen & self.padding.mask(queries, keys, device)[:, None]

    def _keys_of(self, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First key that each query may see, and the end of its range; without padding a query's keys are
        contiguous.
        """
        back, forward = self._reach()
        first = torch.zeros_like(queries) if back is None else queries - back
        stop = torch.full_like(queries, _BEYOND) if forward is None else queries + forward + 1
        if self.documents is not None:
            pinned = queries.device.type == "cuda"  # a pinned source, so that the host does not wait for the copy
            bounds = torch.tensor([*self.documents, _BEYOND], pin_memory=pinned, device="cpu").to(
                queries.device, non_blocking=True
            )
            document = torch.searchsorted(bounds, queries, right=True)
            first, stop = torch.maximum(first, bounds[document - 1]), torch.minimum(stop, bounds[document])
        if self.length is not None:
            stop = torch.where(queries < self.length, stop.clamp(max=self.length), 0)
        return first, stop

    def _reach(self) -> tuple[int | None, int | None]:
        back, forward = self.window
        return back, 0 if self.causal else forward

    def _document(self, position: int) -> int:
        assert self.documents is not None
        return bisect.bisect_right(self.documents, position, lo=1)


def make_masking(
    *,
    causal: bool,
    window: tuple[int, int] | None,
    cu_seqlens: Sequence[int] | None,
    length: int | None,
    padding: torch.Tensor | Padding | None,
    shape: tuple[int, int],
) -> Masking:
    """Validates :func:`attention`'s arguments. A window of -1 is unlimited, as in flash-attention.

    Args:
        causal: as in :func:`attention`, like ``window``, ``cu_seqlens``, ``length`` and ``padding``.
        shape: [batch, tokens of all ranks].

    Raises:
        ValueError: a window below -1; ``cu_seqlens`` that do not rise from 0 to the length; a length beyond the tokens;
            a padding mask of another shape.
    """
    limits: tuple[int | None, int | None] = (None, None)
    if window is not None:
        if len(window) != 2 or min(window) < -1:
            raise ValueError(f"window is {window}; give how many tokens back and forward are seen, -1 for no limit")
        limits = (None if window[0] == -1 else window[0], None if window[1] == -1 else window[1])
    length = shape[1] if length is None else length
    if not 0 < length <= shape[1]:
        raise ValueError(f"length is {length}, but the ranks together have {shape[1]} tokens; give 1 to that")
    documents = None
    if cu_seqlens is not None:
        documents = tuple(int(value) for value in cu_seqlens)
        rises = all(low < high for low, high in zip(documents, documents[1:], strict=False))
        if len(documents) < 2 or documents[0] != 0 or documents[-1] != length or not rises:
            shown = f"{list(documents[:4])}{'…' if len(documents) > 4 else ''}"
            raise ValueError(f"cu_seqlens is {shown}; it must rise from 0 to the length of the sequence, {length}")
    if isinstance(padding, torch.Tensor):
        padding = Padding(padding)
    if padding is not None and tuple(padding.real.shape) != shape:
        raise ValueError(
            f"padding is {list(padding.real.shape)}, but the ranks together have {shape[0]} sequences of {shape[1]} "
            "tokens; give the mask of the whole sequence on every rank, its padding for the ranks included"
        )
    return Masking(causal, limits, documents, length if length < shape[1] else None, padding)

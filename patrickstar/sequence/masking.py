"""Which keys a query may see, by their positions in the whole sequence."""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Sequence

import torch

from patrickstar.sequence.layout import Slice

_BEYOND = 2**62  # after every key


class Cover(enum.Enum):
    """How much of a block of queries and keys is seen."""

    NONE = "nothing"
    ALL = "everything"
    DIAGONAL = "queries and keys are the same tokens, each sees those before and itself"
    SOME = "what the mask says"


class Padding:
    """Which tokens are real, of each sequence of a batch: padding may be on either side and in the middle.

    One object serves all layers of a step: making it looks at the whole mask on the host, and so waits for the device
    if the mask is there.

        padding = Padding(batch["attention_mask"].bool())
        out = attention(q, k, v, group, padding=padding)

    Args:
        real: bool, [batch, tokens of the whole sequence].
        device: that attention is computed on; None: where ``real`` is. Elsewhere each attention copies it there.

    Attributes:
        real: on that device.

    Raises:
        ValueError: ``real`` is not of bool or has not two dimensions.
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
        """How much of a block padding alone leaves: NONE, SOME or ALL."""
        if self.is_all_of(queries) or self.is_all_of(keys):
            return Cover.NONE
        return Cover.SOME if self.is_in(queries) or self.is_in(keys) else Cover.ALL

    def mask(self, queries: Slice, keys: Slice, device: torch.device) -> torch.Tensor:
        """True where padding alone lets a query see a key: bool, [batch, queries, keys]."""
        return self._real(queries, device)[:, :, None] & self._real(keys, device)[:, None, :]

    def _real(self, part: Slice, device: torch.device) -> torch.Tensor:
        return self.real[:, part.start : part.stop].to(device)

    def is_in(self, part: Slice) -> bool:
        """Whether some sequence has padding among these tokens."""
        return bool(self._with_padding[part.stop] > self._with_padding[part.start])

    def is_all_of(self, part: Slice) -> bool:
        """Whether no sequence has a real token among these."""
        return bool(self._with_tokens[part.stop] == self._with_tokens[part.start])


class KeyPadding(Padding):
    """Padding that is not seen, but sees, as in models of Hugging Face: its outputs are not 0."""

    def cover(self, queries: Slice, keys: Slice) -> Cover:
        """See :class:`Padding`; queries may be padding."""
        if self.is_all_of(keys):
            return Cover.NONE
        return Cover.SOME if self.is_in(keys) else Cover.ALL

    def mask(self, queries: Slice, keys: Slice, device: torch.device) -> torch.Tensor:
        """See :class:`Padding`; one query stands for all."""
        return self._real(keys, device)[:, None, :]


def _counts_before(chosen: torch.Tensor) -> torch.Tensor:
    """How many are chosen before each place and before the end."""
    return torch.nn.functional.pad(chosen.long().cumsum(dim=0), (1, 0))


@dataclasses.dataclass(frozen=True, eq=False)
class Masking:
    """The rule. A query sees a key where all parts of it agree.

    Attributes:
        causal: keys before the query, and its own.
        window: how far back and forward of the query, in tokens; None: any way.
        documents: where the documents of a packed sequence begin, and its end (``cu_seqlens``); a query sees keys of
            its own document. None: one document.
        length: tokens before the padding at the end; None: there is none. Nobody sees padding, and it sees nobody: its
            outputs are 0, and so are its gradients.
        padding: the same of padding that differs between sequences; None: there is none.
    """

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    documents: tuple[int, ...] | None = None
    length: int | None = None
    padding: Padding | None = None

    def cover(self, queries: Slice, keys: Slice) -> Cover:
        """Of a block, without looking at each element."""
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
        """The first key that each query may see, and the one behind the last: without padding they are neighbours."""
        back, forward = self._reach()
        first = torch.zeros_like(queries) if back is None else queries - back
        stop = torch.full_like(queries, _BEYOND) if forward is None else queries + forward + 1
        if self.documents is not None:
            pinned = queries.device.type == "cuda"  # then the host does not wait for the copy
            bounds = torch.tensor([*self.documents, _BEYOND], pin_memory=pinned).to(queries.device, non_blocking=True)
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
    """Of what :func:`attention` takes. A window's -1 is no limit, as flash-attention has it.

    Args:
        causal: as there, like ``window``, ``cu_seqlens``, ``length`` and ``padding``.
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

"""Choice of the context-parallel mode that takes least time, by a cost model.

Volumes are those of ring attention (ring.py) and of all-to-all; times follow from link and attention rates. Modes
differ by factors, so the rates need not be exact.
"""

from __future__ import annotations

import dataclasses

from patrickstar.sequence.layout import Mode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attended:
    """Shapes of one layer's attention over the whole sequence."""

    batch: int
    heads: int
    key_heads: int
    head_dim: int
    length: int
    """Tokens of the whole sequence."""
    causal: bool = True
    element_bytes: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """Rates of attention and communication. The defaults are an H200's: flash attention forward and backward, and
    NVLink.
    """

    attention_tflops: float = 500.0
    gbps: float = 200.0
    """1e9 bytes per second that a rank sends while others do the same."""
    latency_seconds: float = 2e-5
    """Seconds per exchange."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """Forward or backward of one layer's attention, per rank."""

    seconds: float
    exposed_seconds: float
    """The part of ``seconds`` that is exposed communication."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen mode, its time for one layer, and a reason that names the others' times."""

    mode: Mode
    forward: Pass
    backward: Pass
    reason: str

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward.seconds + self.backward.seconds

    @property
    def exposed_seconds(self) -> float:
        """Exposed communication of forward and backward."""
        return self.forward.exposed_seconds + self.backward.exposed_seconds


def choose_mode(work: Attended, size: int, links: Links | None = None) -> Choice:
    """The mode that takes least time on ``size`` ranks with equal links. Within 1 %, the first of :func:`candidates`,
    which keeps heads together.
    """
    links = links or Links()
    if size == 1:
        forward, backward = (Pass(seconds, 0.0) for seconds in _shares(work, links))
        return Choice(Mode.ULYSSES, forward, backward, "one rank has the whole sequence")
    found = {mode: predicted_passes(work, size, mode, links) for mode in candidates(work, size)}
    by_mode = {mode: forward.seconds + backward.seconds for mode, (forward, backward) in found.items()}
    best = min(by_mode.values())
    mode = next(mode for mode, seconds in by_mode.items() if seconds <= 1.01 * best)
    others = ", ".join(f"{other.value} {show_seconds(by_mode[other])}" for other in by_mode if other is not mode)
    reason = f"{mode.value} takes {show_seconds(by_mode[mode])} a layer"
    if others:
        reason += f" ({others})"
    if Mode.ULYSSES not in by_mode:
        reason += f"; {work.heads} heads cannot be divided among {size} ranks, so not ulysses"
    return Choice(mode, *found[mode], reason)


def show_seconds(seconds: float) -> str:
    """Formats seconds with three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def candidates(work: Attended, size: int) -> list[Mode]:
    """Modes that the shapes allow. With causal attention zigzag replaces the ring, whose last rank has most of the
    work.
    """
    ring = Mode.ZIGZAG if work.causal else Mode.RING
    return [ring] if work.heads % size else [ring, Mode.ULYSSES]


def attention_seconds(work: Attended, links: Links) -> float:
    """Seconds of the whole attention on one device: 2 products forward and 5 backward, each of 2 * length^2 * head_dim
    operations per head; half if causal.
    """
    products = 7 * 2 * work.batch * work.heads * work.length**2 * work.head_dim
    return products * (0.5 if work.causal else 1.0) / (links.attention_tflops * 1e12)


def _shares(work: Attended, links: Links) -> tuple[float, float]:
    """:func:`attention_seconds`, split into forward and backward."""
    whole = attention_seconds(work, links)
    return whole * 2 / 7, whole * 5 / 7


def predicted_passes(work: Attended, size: int, mode: Mode, links: Links) -> tuple[Pass, Pass]:
    """Forward and backward of one layer. Ring transfers overlap with computation, all but the last; all-to-all is
    exposed.
    """
    passes = []
    for whole, sent, turns in zip(_shares(work, links), sent_bytes(work, size, mode), (1, 2), strict=True):
        share = whole / size
        if mode is Mode.RING and work.causal:
            share *= 2 - 1 / size  # the last rank sees all keys
        exposed = sent / (links.gbps * 1e9)
        if mode is Mode.ULYSSES:
            exposed += 4 * links.latency_seconds
        else:
            exposed += turns * (size - 1) * links.latency_seconds - share * (size - 1) / size
        exposed = max(exposed, 0.0)
        passes.append(Pass(share + exposed, exposed))
    return passes[0], passes[1]


def sent_bytes(work: Attended, size: int, mode: Mode) -> tuple[int, int]:
    """Bytes that each rank sends for one layer, in forward and in backward."""
    queries = work.batch * work.heads * (work.length // size) * work.head_dim
    keys = work.batch * work.key_heads * (work.length // size) * work.head_dim
    if mode is Mode.ULYSSES:
        # A key head goes to every rank that has a query head using it.
        keys = max(keys, queries * size // work.heads)
        each = (2 * queries + 2 * keys) * (size - 1) // size * work.element_bytes
        return each, each
    turn = 2 * (size - 1) * keys
    return turn * work.element_bytes, turn * (work.element_bytes + max(work.element_bytes, 4))

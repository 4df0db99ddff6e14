"""Which way of computing attention over a divided sequence takes least time, by counting.

Volumes are those of [Note: the ring] (ring.py) and of all-to-all; times follow from the rates of one link and of the
device's attention. They decide between ways that differ by factors, so that rates need not be exact.
"""

from __future__ import annotations

import dataclasses

from patrickstar.sequence.layout import Mode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attended:
    """One layer's attention over the whole sequence."""

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
    """How fast ranks compute attention and talk. The defaults are an H200's: flash attention forward and backward, and
    what a GPU sends over NVLink.
    """

    attention_tflops: float = 500.0
    gbps: float = 200.0
    """1e9 bytes per second that a rank sends, while others do the same."""
    latency_seconds: float = 2e-5
    """Of each exchange."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way, the seconds that it takes for one layer, forward and backward, and why not the others."""

    mode: Mode
    seconds: float
    exposed_seconds: float
    """Of these, what ranks wait for each other's tensors."""
    reason: str


def choose_mode(work: Attended, size: int, links: Links | None = None) -> Choice:
    """The way that takes least time on ``size`` ranks which are linked alike. Where two take the same within 1 %, the
    one that leaves heads together.
    """
    links = links or Links()
    if size == 1:
        return Choice(Mode.ULYSSES, attention_seconds(work, links), 0.0, "one rank has the whole sequence")
    by_mode = {mode: predicted_seconds(work, size, mode, links) for mode in candidates(work, size)}
    best = min(seconds for seconds, _ in by_mode.values())
    mode = next(mode for mode, (seconds, _) in by_mode.items() if seconds <= 1.01 * best)
    seconds, exposed = by_mode[mode]
    others = ", ".join(f"{other.value} {by_mode[other][0] * 1e3:.3g} ms" for other in by_mode if other is not mode)
    reason = f"{mode.value} takes {seconds * 1e3:.3g} ms a layer"
    if others:
        reason += f" ({others})"
    if Mode.ULYSSES not in by_mode:
        reason += f"; {work.heads} heads cannot be divided among {size} ranks, so not ulysses"
    return Choice(mode, seconds, exposed, reason)


def candidates(work: Attended, size: int) -> list[Mode]:
    """Those that the shapes allow; with causal attention zigzag in the place of the ring, whose last rank has most of
    the work.
    """
    ring = Mode.ZIGZAG if work.causal else Mode.RING
    return [ring] if work.heads % size else [ring, Mode.ULYSSES]


def attention_seconds(work: Attended, links: Links) -> float:
    """Of all of it on one device: 2 products forward and 5 backward, each of 2 * length^2 * head_dim operations a head;
    half where attention is causal.
    """
    products = 7 * 2 * work.batch * work.heads * work.length**2 * work.head_dim
    return products * (0.5 if work.causal else 1.0) / (links.attention_tflops * 1e12)


def predicted_seconds(work: Attended, size: int, mode: Mode, links: Links) -> tuple[float, float]:
    """Of one layer, forward and backward; and what of it is exposed communication."""
    share = attention_seconds(work, links) / size
    if mode is Mode.RING and work.causal:
        share *= 2 - 1 / size  # of the last rank, which sees all keys
    sent = sent_bytes(work, size, mode) / (links.gbps * 1e9)
    if mode is Mode.ULYSSES:  # nothing is computed meanwhile
        exposed = sent + 8 * links.latency_seconds
        return share + exposed, exposed
    turns = 3 * (size - 1)
    exposed = max(sent + turns * links.latency_seconds - share * (size - 1) / size, 0.0)
    return share + exposed, exposed


def sent_bytes(work: Attended, size: int, mode: Mode) -> int:
    """By each rank, of one layer, forward and backward."""
    queries = work.batch * work.heads * (work.length // size) * work.head_dim
    keys = work.batch * work.key_heads * (work.length // size) * work.head_dim
    if mode is Mode.ULYSSES:
        # A key head goes to every rank that has a query head of it.
        keys = max(keys, queries * size // work.heads)
        return 2 * (2 * queries + 2 * keys) * (size - 1) // size * work.element_bytes
    return (size - 1) * keys * (4 * work.element_bytes + 2 * max(work.element_bytes, 4))

"""The timeline of a step whose checkpointed calls save activations, from one in which they save nothing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from patrickstar import _C
from patrickstar.activations.activation_rules import MOST_LEAVING, Saved
from patrickstar.activations.call_measurement import MeasuredCall
from patrickstar.planning.leaving import Copies
from patrickstar.planning.timeline import TimedTimeline
from patrickstar.planning.update_costs import ADAM

_FRAGMENTS = 1.1
"""Device memory of saved activations relative to their bytes: PyTorch's allocator does not fill its segments. With 45
GB saved beside chunk buffers, 2 GB more were reserved than planned (docs/log.md).
"""


def memory_of(saved_bytes: int) -> int:
    """Device memory of saved activations."""
    return int(_FRAGMENTS * saved_bytes)


def step_with_saved(timed: TimedTimeline, saved: Sequence[Saved]) -> TimedTimeline:
    """The timeline of a step that saves nothing, if its calls save ``saved``, by number; further calls save nothing.

    Saved bytes grow during the call's forward and stay until its recomputation, products until that ends. Without
    recomputation, its accesses are left out, and the access before them takes over their gradients, their copies and
    the rest of their time. With saved products, recomputation is shorter by their time. Products on the host leave and
    come back as :mod:`patrickstar.activations.products_on_host` lets them. Where all backward is one access, which
    holds every parameter, recomputations have none of their own.
    """
    uses = [access["uses"] for access in timed.accesses]
    peaks = [access["activation_peak_bytes"] for access in timed.accesses]
    seconds = list(timed.seconds)
    copies = [dataclasses.replace(copied) for copied in timed.copies]
    left_out: set[int] = set()
    for call in timed.calls:
        kept = _saved_by(call, saved)
        if kept is Saved.NOTHING:
            continue
        num_bytes = memory_of(call.saved_bytes if kept is Saved.EVERYTHING else call.product_bytes)
        forward = max(call.forward_end - call.forward_begin, 1)
        for index in range(max(call.forward_begin, 0), call.recompute_begin + 1):
            share = min((index - call.forward_begin) / forward, 1.0)
            peaks[index] += int(num_bytes * share)
        recomputed = range(call.recompute_begin + 1, call.recompute_end + 1)
        if kept is not Saved.EVERYTHING:
            for index in recomputed:
                peaks[index] += num_bytes
            total = sum(seconds[index] for index in recomputed)
            left = max(total - call.product_seconds, 0.0) / total if total > 0 else 1.0
            for index in recomputed:
                seconds[index] *= left
        else:
            before = call.recompute_begin
            moved = [use for index in recomputed for use in uses[index] if use[2] != _C.ArrayUseMode.READ]
            uses[before] = list(dict.fromkeys([*uses[before], *moved]))
            peaks[before] = max(peaks[index] for index in (before, *recomputed[-1:]))
            seconds[before] += sum(seconds[index] for index in recomputed) - call.recompute_seconds
            seconds[before] = max(seconds[before], 0.0)
            for index in recomputed if copies else ():
                copies[before].add(copies[index])
            left_out.update(recomputed)
    last = len(seconds) - 1
    for sent in _sent_products(timed.calls, saved):
        copies = copies or [Copies() for _ in peaks]
        call, num_bytes = sent.call, sent.call.product_bytes
        copies[call.forward_end].leaving += num_bytes
        copies[min(sent.return_at, last)].coming += num_bytes
        copies[min(call.recompute_begin + 1, last)].needed += num_bytes
        for index in range(sent.gone_at, sent.return_at):
            peaks[index] -= memory_of(num_bytes)
    stays = [index for index in range(len(seconds)) if index not in left_out]
    accesses = [
        {**timed.accesses[index], "uses": uses[index], "activation_peak_bytes": peaks[index]} for index in stays
    ]
    of_stays = [copies[index] for index in stays] if copies else []
    return TimedTimeline(accesses, [seconds[index] for index in stays], timed.waste_bytes, of_stays)


def sent_bytes(calls: Sequence[MeasuredCall], saved: Sequence[Saved]) -> int:
    """Most bytes of products on the host, if calls save ``saved``."""
    by_forward = (
        sum(call.product_bytes for call in forward if _saved_by(call, saved) is Saved.PRODUCTS_ON_HOST)
        for forward in _forwards(calls)
    )
    return max(by_forward, default=0)


def slowdown_of_updates(calls: Sequence[MeasuredCall], saved: Sequence[Saved], numel: int) -> float:
    """Time of updates of ``numel`` parameters on the host beside copies of products, relative to updates alone.

    The host's memory limits both. A product enters and leaves it once, an update moves ``ADAM.traffic_bytes``.
    """
    copied_bytes = 2 * sum(call.product_bytes for call in calls if _saved_by(call, saved) is Saved.PRODUCTS_ON_HOST)
    return 1 + copied_bytes / (ADAM.traffic_bytes * max(numel, 1))


def most_sent(timed: TimedTimeline, download_gbps: float, room_bytes: int) -> int:
    """Most calls of a forward that may send their products: as many as the link carries while a forward computes, and
    as ``room_bytes`` of host memory hold. The last call does not.
    """
    numbers = []
    for calls in _forwards(timed.calls):
        inside = (timed.seconds[call.forward_begin + 1 : call.forward_end + 1] for call in calls)
        seconds = sum(itertools.chain.from_iterable(inside))
        product_bytes = max(call.product_bytes for call in calls)
        bound = min(seconds * download_gbps * 1e9, room_bytes) // max(product_bytes, 1)
        numbers.append(min(int(bound), len(calls) - 1) if product_bytes else 0)
    return max(min(numbers, default=0), 0)


def _saved_by(call: MeasuredCall, saved: Sequence[Saved]) -> Saved:
    return saved[call.number] if call.number < len(saved) else Saved.NOTHING


def _forwards(calls: Sequence[MeasuredCall]) -> Iterator[list[MeasuredCall]]:
    """Yields the calls of each forward, in their order."""
    forward: list[MeasuredCall] = []
    for call in sorted(calls, key=lambda call: (call.forward_begin, call.number)):
        if forward and call.number <= forward[-1].number:
            yield forward
            forward = []
        forward.append(call)
    if forward:
        yield forward


@dataclasses.dataclass(frozen=True)
class _SentProducts:
    """Products on the host, by positions in accesses."""

    call: MeasuredCall
    gone_at: int
    """First access without them on the device: they have left, or a later call waited for that."""
    return_at: int
    """Access before which they begin to come back."""


def _sent_products(calls: Sequence[MeasuredCall], saved: Sequence[Saved]) -> Iterator[_SentProducts]:
    keeping = (Saved.PRODUCTS, Saved.PRODUCTS_ON_HOST)
    for forward in _forwards(calls):
        keep = [call for call in forward if _saved_by(call, saved) in keeping]
        following = dict(zip((call.number for call in keep), keep[1:], strict=False))
        sent = [call for call in keep[:-1] if _saved_by(call, saved) is Saved.PRODUCTS_ON_HOST]
        for index, call in enumerate(sent):
            return_at = following[call.number].recompute_begin + 1
            waits = index + MOST_LEAVING < len(sent)
            gone_at = sent[index + MOST_LEAVING].forward_end + 1 if waits else return_at
            yield _SentProducts(call, gone_at, return_at)

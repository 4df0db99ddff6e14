"""Products of checkpointed calls that wait in host memory between a call's forward and its recomputation.

    on_host = ProductsOnHost(runtime, least_bytes=2**20, most_leaving=2)
    on_host.begin_forward()
    place = on_host.place(Saved.PRODUCTS_ON_HOST)  # for each call that keeps products, in order
    contexts = keep_products(needed, place)

A call's products leave together at the end of its forward. They come back when the recomputation of the next later call
with products begins, so the last such call keeps its products on the device.
"""

from __future__ import annotations

import collections
import weakref
from typing import Protocol

import torch

from patrickstar import _C
from patrickstar.activations.activation_rules import Saved
from patrickstar.activations.host_copies import CopyPlace, HostCopy, is_whole


class KeptProduct(Protocol):
    """A product that a recomputation reads."""

    @property
    def is_unchanged(self) -> bool:
        """True if it was not changed in place since it was kept."""
        ...

    def take(self) -> torch.Tensor:
        """The value on the device."""
        ...


class OnDevice:
    """A product that stays on the device. ``tensor`` shares the version counter of the one that the model sees."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor
        self._version = tensor._version

    @property
    def is_unchanged(self) -> bool:
        """See :class:`KeptProduct`."""
        return self._tensor._version == self._version

    def take(self) -> torch.Tensor:
        """See :class:`KeptProduct`."""
        return self._tensor


class ProductPlace:
    """Place of one call's products: the device."""

    def keep(self, product: torch.Tensor) -> KeptProduct:
        """Keeps ``product``, which shares the version counter of the one that the model sees."""
        return OnDevice(product)

    def end_forward(self) -> None:
        """Called when the call's forward has ended."""

    def begin_recomputation(self) -> None:
        """Called before the call is recomputed."""


class ProductsOnHost:
    """Places of the products of one engine's forwards. Forwards and backwards must not overlap.

    Autograd's graph owns places and products.

    Args:
        runtime: of the engine.
        least_bytes: smaller products stay on the device.
        most_leaving: calls whose products may be on their way to the host. The launching thread waits for older ones.
    """

    def __init__(self, runtime: _C.Runtime, *, least_bytes: int, most_leaving: int):
        self._runtime = runtime
        self._least_bytes = least_bytes
        self._most_leaving = most_leaving
        self._last: weakref.ref[LinkedPlace] | None = None  # of this forward
        self._leaving: collections.deque[weakref.ref[LinkedPlace]] = collections.deque()

    def begin_forward(self) -> None:
        """Forgets the places of earlier forwards."""
        self._last = None

    def place(self, saved: Saved) -> LinkedPlace:
        """The place of the next call's products. ``saved``: PRODUCTS or PRODUCTS_ON_HOST."""
        kind = HostPlace if saved is Saved.PRODUCTS_ON_HOST else LinkedPlace
        place = kind(self, None if self._last is None else self._last())
        self._last = weakref.ref(place)
        return place

    def copy_of(self, product: torch.Tensor) -> HostCopy | None:
        """The product, to be sent; None if it must stay on the device."""
        if product.nbytes < self._least_bytes or not is_whole(product):
            return None
        return HostCopy(self._runtime, product)

    def send(self, place: LinkedPlace) -> None:
        """Starts the copies of ``place``. Without room on the host the rest stays."""
        for copy in place.copies:
            if copy.is_unchanged and not copy.leave():
                break
        self._leaving.append(weakref.ref(place))
        self._release(self._most_leaving)

    def finish(self) -> None:
        """Waits for all running copies to the host."""
        self._release(0)

    def _release(self, most_leaving: int) -> None:
        """Frees device memory of products that have left, and waits until at most ``most_leaving`` calls' have not."""
        while self._leaving:
            place = self._leaving[0]()
            if place is not None and not place.has_left and len(self._leaving) <= most_leaving:
                return
            self._leaving.popleft()
            if place is not None:
                place.finish_leaving()


class LinkedPlace(ProductPlace):
    """The device, for a call after others that may have products on the host.

    Attributes:
        copies: products that are sent, until the call is recomputed.
    """

    def __init__(self, store: ProductsOnHost, before: LinkedPlace | None):
        self._store = store
        self._before = None if before is None else weakref.ref(before)
        self.copies: list[HostCopy] = []

    @property
    def has_left(self) -> bool:
        """True if no copy to the host is running."""
        return all(copy.has_left for copy in self.copies)

    def finish_leaving(self) -> None:
        """Waits for the copies to the host, and releases the device memory."""
        for copy in self.copies:
            if copy.place is CopyPlace.LEAVING:
                copy.finish_leaving()

    def begin_recomputation(self) -> None:
        """Lets the products of the call before come back."""
        self.copies = []
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()

    def fetch(self) -> None:
        """Starts the copies to the device. Products that have not left completely stay."""
        for copy in self.copies:
            if copy.place is CopyPlace.AWAY:
                copy.fetch()
        self.copies = []


class HostPlace(LinkedPlace):
    """Host memory."""

    def keep(self, product: torch.Tensor) -> KeptProduct:
        """See :class:`ProductPlace`. Small products stay on the device."""
        copy = self._store.copy_of(product)
        if copy is None:
            return super().keep(product)
        self.copies.append(copy)
        return copy

    def end_forward(self) -> None:
        """See :class:`ProductPlace`."""
        self._store.send(self)

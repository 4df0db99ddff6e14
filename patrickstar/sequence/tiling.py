"""Token-wise functions in tiles of tokens: their intermediate tensors exist for one tile at a time.

    output = in_tiles(mlp, hidden, list(mlp.parameters()), tile_tokens=4096)

A gated Llama MLP keeps four tensors of [tokens, intermediate size] for backward, and makes about as many in it. In
tiles, forward keeps only its input. Backward recomputes a tile's forward, with autograd, right before the tile's
backward (TiledMLP in Bekman et al., *Arctic Long Sequence Training*, arXiv 2506.13996).

A parameter's gradient is summed over tiles, in order, in float32 (float64 for float64), and rounded once. Autograd gets
the sum as one gradient per call, tiled or not.

The input is saved by a separate node (:class:`_Kept`) before anything is computed. If a layer is checkpointed
(``torch.utils.checkpoint`` with ``use_reentrant=False``), its recomputation stops once all saved tensors exist. So a
tiled MLP at the end of a layer is not computed a third time.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from patrickstar import _C
from patrickstar.differentiation import differentiable_once

Compute = Callable[[torch.Tensor], torch.Tensor]

_counting: contextvars.ContextVar[Callable[[int], None] | None] = contextvars.ContextVar("counting", default=None)


@contextlib.contextmanager
def equal_tiles_once(counting: Callable[[int], None]) -> Iterator[None]:
    """For meta tensors: context in which a call's second tile stands for all others of its size.

    Args:
        counting: called with the number of tiles that the next one stands for, and with 1 at the end.
    """
    before = _counting.set(counting)
    try:
        yield
    finally:
        _counting.reset(before)


def in_tiles(
    compute: Compute,
    hidden: torch.Tensor,
    params: Sequence[torch.Tensor],
    tile_tokens: int,
    *,
    name: str = "compute",
) -> torch.Tensor:
    """Computes ``compute(hidden)``, a token-wise function, ``tile_tokens`` tokens at a time.

    Outputs and gradients of ``hidden`` are those of ``compute(hidden)``. Bits are equal if a row of a matrix product
    does not depend on the number of rows; BLAS may choose another kernel for it, and then they differ by rounding.
    Gradients of ``params`` are sums over tiles. Random numbers are drawn tile by tile, and repeated in recomputation:
    dropout differs from that of all tokens at once. There are no second derivatives.

    Args:
        compute: called with [1, ..., 1, tokens of the tile, size], of as many dimensions as ``hidden``; returns one
            tensor with these tokens.
        hidden: [..., tokens, size], floating point. All dimensions but the last count as tokens. Up to ``tile_tokens``
            of them are computed without tiles.
        params: the trained tensors that ``compute`` uses. Other tensors that require grad get no gradient.
        tile_tokens: tokens of a tile; the last one may have fewer.
        name: name of ``compute``, for errors.

    Returns:
        [..., tokens, size of the output].

    Raises:
        ValueError: ``tile_tokens`` is less than 1, ``hidden`` has less than two dimensions, or ``compute`` did not
            return one tensor with its tokens.
    """
    if tile_tokens < 1:
        raise ValueError(f"tile_tokens is {tile_tokens}; give at least 1")
    if hidden.dim() < 2:
        raise ValueError(f"{name} was called with {list(hidden.shape)}; tiles need [..., tokens, size]")
    if hidden.numel() <= tile_tokens * hidden.shape[-1]:
        return compute(hidden)
    call = _TiledCall(compute, tile_tokens, hidden.dim(), name)
    trained = [param for param in params if param.requires_grad]
    if not torch.is_grad_enabled() or not (trained or hidden.requires_grad):
        return call.forward(hidden, lambda: None)
    token = torch.empty(0, device=hidden.device, requires_grad=True)
    return _Tiles.apply(call, _Kept.apply(token, hidden.detach()), hidden, *trained)


@dataclasses.dataclass(frozen=True)
class _TiledCall:
    """One call of ``compute`` in tiles."""

    compute: Compute
    tile_tokens: int
    num_dims: int
    name: str

    def tiles(self, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Each tile's rows of ``hidden``, and the tile in ``compute``'s shape."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        for begin in self._begins(rows.shape[0]):
            place = slice(begin, min(begin + self.tile_tokens, rows.shape[0]))
            yield place, rows[place].view(*[1] * (self.num_dims - 2), -1, rows.shape[1])

    def _begins(self, num_rows: int) -> Iterator[int]:
        counting = _counting.get()
        if counting is None:
            yield from range(0, num_rows, self.tile_tokens)
            return
        num_whole, rest = divmod(num_rows, self.tile_tokens)
        # The first tile differs: its gradients become the sums.
        tiles = [(0, 1), (1, num_whole - 1), (num_whole, 1 if rest else 0)]
        for index, count in tiles:
            if count > 0:
                counting(count)
                yield index * self.tile_tokens
        counting(1)

    def forward(self, hidden: torch.Tensor, before_tile: Callable[[], None]) -> torch.Tensor:
        """The output; ``before_tile`` is called before each tile."""
        num_rows = hidden.numel() // hidden.shape[-1]
        output: torch.Tensor | None = None
        for place, tile in self.tiles(hidden):
            before_tile()
            rows = self._rows_of(self.compute(tile), tile)
            if output is None:
                output = rows.new_empty((num_rows, rows.shape[1]))
            output[place] = rows
            del rows
        assert output is not None  # holds: there are more tokens than in a tile
        return output.view(*hidden.shape[:-1], output.shape[1])

    def _rows_of(self, output: Any, tile: torch.Tensor) -> torch.Tensor:
        if isinstance(output, torch.Tensor) and output.shape[:-1] == tile.shape[:-1]:
            return output.reshape(-1, output.shape[-1])
        shown = list(output.shape) if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
        raise ValueError(
            f"{self.name} gave {shown} for a tile of {list(tile.shape)}; in tiles it must give one tensor with the "
            "tokens it is called with: leave it untiled"
        )


class _Kept(torch.autograd.Function):
    """Saves the input before anything is computed, and returns a token whose node leads to it."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Saves ``hidden``, which is detached."""
        ctx.save_for_backward(hidden)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        """Returns no gradients; nothing depends on the token."""
        return None, None


class _Tiles(torch.autograd.Function):
    """The tiles of one call, as one node of the autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, call: _TiledCall, kept: torch.Tensor, hidden: torch.Tensor, *trained: torch.Tensor
    ) -> torch.Tensor:
        """Saves only the random generators' states at each tile, if ``compute`` draws numbers."""
        ctx.call, ctx.kept, ctx.trained = call, kept.grad_fn, trained
        ctx.autocast = _Autocast.of(hidden.device)
        ctx.random = _RandomNumbers(hidden.device)
        output = call.forward(hidden, ctx.random.note)
        ctx.random.end()
        return output

    @staticmethod
    @differentiable_once("tiled modules", "leave tile_tokens out")
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        """Runs forward and backward of one tile after the other."""
        call, needs_hidden = ctx.call, ctx.needs_input_grad[2]
        (hidden,) = ctx.kept.saved_tensors
        grad_rows = grad.reshape(-1, grad.shape[-1])
        grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs_hidden else None
        hidden_rows = None if grad_hidden is None else grad_hidden.view(-1, hidden.shape[-1])
        sums = [_Sum() for _ in ctx.trained]
        with ctx.random.replayed() as begin_tile:
            for index, (place, rows) in enumerate(call.tiles(hidden)):
                tile = rows.detach().requires_grad_(needs_hidden)
                begin_tile(index)
                with torch.enable_grad(), ctx.autocast.entered():
                    output = call.compute(tile)
                found = _gradients(output, grad_rows[place], [tile, *ctx.trained])
                del output
                if hidden_rows is not None and found[0] is not None:
                    hidden_rows[place] = found[0].view(-1, hidden.shape[-1])
                elif hidden_rows is not None:
                    hidden_rows[place] = 0
                for gradient, total in zip(found[1:], sums, strict=True):
                    total.add(gradient)
                del found
        ends = (total.end(param) for total, param in zip(sums, ctx.trained, strict=True))
        return (None, None, grad_hidden, *ends)


def _gradients(output: torch.Tensor, grad: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradient of each input; None if it requires none or was not used."""
    asked = [index for index, tensor in enumerate(inputs) if tensor.requires_grad]
    result: list[torch.Tensor | None] = [None] * len(inputs)
    if output.requires_grad:
        found = torch.autograd.grad(
            output, [inputs[index] for index in asked], grad.view(output.shape), allow_unused=True
        )
        for index, gradient in zip(asked, found, strict=True):
            result[index] = gradient
    return result


class _Sum:
    """Accumulates the gradients of one parameter over tiles."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor | None) -> None:
        """Adds a tile's gradient; None is ignored."""
        if gradient is None:
            return
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if self._total is None:
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self._total = gradient.to(dtype, copy=True)  # a copy: it may share memory with the output's
        else:
            self._total.add_(gradient)

    def end(self, param: torch.Tensor) -> torch.Tensor | None:
        """The sum in the parameter's dtype; frees its memory."""
        total, self._total = self._total, None
        return None if total is None else total.to(param.dtype)


@dataclasses.dataclass(frozen=True)
class _Autocast:
    """Autocast options of one device, for use in recomputation."""

    options: dict[str, Any] | None

    @classmethod
    def of(cls, device: torch.device) -> _Autocast:
        """The current options."""
        kind = device.type
        if not torch.amp.is_autocast_available(kind):
            return cls(None)
        # Without autocast's cache: cached tensors belong to the graph of one tile.
        dtype = torch.get_autocast_dtype(kind)
        enabled = torch.is_autocast_enabled(kind)
        return cls({"device_type": kind, "enabled": enabled, "dtype": dtype, "cache_enabled": False})

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Context with the recorded options."""
        return contextlib.nullcontext() if self.options is None else torch.autocast(**self.options)


class _RandomNumbers:
    """Generator states of the host and ``device`` at the start of each tile."""

    def __init__(self, device: torch.device):
        self._devices = [torch.device("cpu")] + ([device] if device.type == "cuda" else [])
        self._states: list[list[torch.Tensor]] = []

    def note(self) -> None:
        """Records the states at a tile's start."""
        self._states.append(self._state())

    def end(self) -> None:
        """Ends recording; the states are dropped if no number was drawn."""
        if all(map(torch.equal, self._states[0], self._state())):
            self._states = []

    @contextlib.contextmanager
    def replayed(self) -> Iterator[Callable[[int], None]]:
        """Context that yields a function; call it with a tile's index before recomputing the tile. Restores the
        generators at the end.
        """
        if not self._states:
            yield lambda index: None
            return
        before = self._state()
        try:
            yield lambda index: self._set(self._states[index])
        finally:
            self._set(before)

    def _state(self) -> list[torch.Tensor]:
        with _C.HostAllocations():
            return [
                torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
                for device in self._devices
            ]

    def _set(self, states: list[torch.Tensor]) -> None:
        for device, state in zip(self._devices, states, strict=True):
            torch.set_rng_state(state) if device.type == "cpu" else torch.cuda.set_rng_state(state, device)

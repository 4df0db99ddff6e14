"""What treats every token alone, computed in tiles of tokens: its intermediate tensors exist for one tile at a time.

    output = in_tiles(mlp, hidden, list(mlp.parameters()), tile_tokens=4096)

A gated MLP of Llama's keeps four tensors of [tokens, intermediate size] for its backward, and makes about as many in
it. Here its forward keeps its input alone, and backward computes a tile's forward again, with autograd, right before
the tile's backward (Bekman et al., *Arctic Long Sequence Training*, arXiv 2506.13996, call it TiledMLP).

[Note: gradients of tiles] A parameter's gradient is the sum over tiles, in their order, in float32 (float64 for
float64), rounded once. Autograd gets it in one piece, so whoever waits for gradients of parameters sees one for each
call, tiled or not.

[Note: the input is kept first] The input is kept by a node of its own, before anything is computed. Where a layer is
checkpointed (``torch.utils.checkpoint`` with ``use_reentrant=False``), its recomputation ends as soon as all is there
that was kept; so a layer that ends with a tiled MLP does not compute that a third time.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from patrickstar import _C

Compute = Callable[[torch.Tensor], torch.Tensor]

_counting: contextvars.ContextVar[Callable[[int], None] | None] = contextvars.ContextVar("counting", default=None)


@contextlib.contextmanager
def equal_tiles_once(counting: Callable[[int], None]) -> Iterator[None]:
    """For tensors without values, on the meta device: within it a call's second tile stands for all others of its size.

    Args:
        counting: told how many tiles the one that begins stands for, and 1 when tiles are over.
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
    """``compute(hidden)``, of which every token's output depends on that token alone, ``tile_tokens`` at a time.

    Outputs and gradients of ``hidden`` are those of ``compute(hidden)``; their bits are the same where a row of a
    matrix product does not depend on how many rows there are. BLAS may choose another kernel for another number of
    rows, and then they differ by rounding. Gradients of ``params`` are sums over tiles ([Note: gradients of tiles]).
    Random numbers are drawn tile by tile, and again when a tile is computed again: dropout drops the same in both, but
    not what it would drop of all tokens at once. No second derivatives.

    Args:
        compute: called with [1, ..., 1, tokens of the tile, size], of as many dimensions as ``hidden``; returns one
            tensor with these tokens.
        hidden: [..., tokens, size], floating point. All dimensions but the last count as tokens. With no more than
            ``tile_tokens`` of them it is computed as it is.
        params: what ``compute`` uses and is trained. Tensors that require grad and are not named get no gradient.
        tile_tokens: tokens of a tile; the last one has what is left.
        name: of ``compute``, for errors.

    Returns:
        [..., tokens, size of the output].

    Raises:
        ValueError: ``tile_tokens`` is less than 1, ``hidden`` has less than two dimensions, or ``compute`` returned
            something else than one tensor with the tokens it was given.
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
        """Which rows of ``hidden`` each tile has, and the tile as ``compute`` gets it."""
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
        # The first one differs: its gradients become the sums.
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
        assert output is not None  # there are more tokens than in a tile
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
    """[Note: the input is kept first]. Gives a token, by whose node the input is found again."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Keeps ``hidden``, which is detached."""
        ctx.save_for_backward(hidden)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        """Nothing depends on the token."""
        return None, None


class _Tiles(torch.autograd.Function):
    """The tiles of one call, as one node of autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, call: _TiledCall, kept: torch.Tensor, hidden: torch.Tensor, *trained: torch.Tensor
    ) -> torch.Tensor:
        """Keeps nothing but what random numbers it began each tile with, where it used some."""
        ctx.call, ctx.kept, ctx.trained = call, kept.grad_fn, trained
        ctx.autocast = _Autocast.of(hidden.device)
        ctx.random = _RandomNumbers(hidden.device)
        output = call.forward(hidden, ctx.random.note)
        ctx.random.end()
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):  # type: ignore[override]
        """Forward and backward of one tile after the other."""
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
    """Of each input, None where it requires none or was not used."""
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
    """Of the gradients of one parameter; see [Note: gradients of tiles]."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor | None) -> None:
        """Adds a tile's, or nothing."""
        if gradient is None:
            return
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if self._total is None:
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self._total = gradient.to(dtype, copy=True)  # a copy: it may share memory with the output's
        else:
            self._total.add_(gradient)

    def end(self, param: torch.Tensor) -> torch.Tensor | None:
        """The sum in the parameter's dtype; its memory is given back."""
        total, self._total = self._total, None
        return None if total is None else total.to(param.dtype)


@dataclasses.dataclass(frozen=True)
class _Autocast:
    """Of one device, as it is in a forward."""

    options: dict[str, Any] | None

    @classmethod
    def of(cls, device: torch.device) -> _Autocast:
        """As it is now."""
        kind = device.type
        if not torch.amp.is_autocast_available(kind):
            return cls(None)
        # Not cached: what is cached belongs to the graph of one tile.
        dtype = torch.get_autocast_dtype(kind)
        enabled = torch.is_autocast_enabled(kind)
        return cls({"device_type": kind, "enabled": enabled, "dtype": dtype, "cache_enabled": False})

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """As it was then."""
        return contextlib.nullcontext() if self.options is None else torch.autocast(**self.options)


class _RandomNumbers:
    """The states of the generators of the host and of ``device`` at the beginning of each tile."""

    def __init__(self, device: torch.device):
        self._devices = [torch.device("cpu")] + ([device] if device.type == "cuda" else [])
        self._states: list[list[torch.Tensor]] = []

    def note(self) -> None:
        """A tile begins."""
        self._states.append(self._state())

    def end(self) -> None:
        """All tiles were computed; nothing is kept where none has drawn a number."""
        if all(map(torch.equal, self._states[0], self._state())):
            self._states = []

    @contextlib.contextmanager
    def replayed(self) -> Iterator[Callable[[int], None]]:
        """Gives what is called with a tile's index before it is computed again. Generators are what they were then."""
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

"""All-to-all of tokens between the ranks that divide a layer's experts.

    ranks = ExpertRanks(neighbours)
    out = parallel_experts(module, ranks, hidden, top_k_index, top_k_weights)

Each rank routes its own tokens. Rows go to the ranks of their experts, are sorted by expert there, and come back. No
token is dropped. The number of rows that each rank sends and receives is read on the host, once in each forward.

[Note: mean of gradients] Other parameters get the mean of the ranks' gradients. An expert gets those of all ranks'
tokens, so their rows carry one over the number of ranks, by which gradients of tokens are multiplied again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from patrickstar import _C
from patrickstar.module import expert_rows, fp8_experts
from patrickstar.module.expert_rows import Routing
from patrickstar.module.fused_experts import products, up_name
from patrickstar.ranks.exchanges import addresses, all_to_all_pairs
from patrickstar.ranks.mesh import SomeRanks

_PIECE_BYTES = 64 * 2**20  # gathered at a time


class ExpertRanks:
    """The ranks that divide experts. All of them must call the same methods in the same order.

    Attributes:
        index: this process's index among them.
        size: number of ranks.
        meet: called before each exchange; see [Note: ranks that meet] in ``sequence/group.py``.
    """

    def __init__(self, ranks: SomeRanks):
        """Collective over all ranks of the mesh."""
        self.index, self.size = ranks.rank, ranks.size
        self.meet: Callable[[], object] = lambda: None
        self._device = ranks.context.device
        self._communicator = ranks.open_communicator("tokens of experts")

    def arrange(self, routing: Routing) -> Travel:
        """Numbers and order of the rows that travel. One exchange, and one read on the host."""
        ends = routing.offsets
        counts = ends.long().diff(prepend=ends.new_zeros(1, dtype=torch.long)).view(self.size, -1)
        ones = [1] * self.size
        arriving = self.exchange(counts, ones, ones)
        sends, receives = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        return Travel.of(sends, receives, arriving)

    def exchange(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Rows from all ranks, by rank.

        Args:
            rows: contiguous, on the device: first those for rank 0.
            sends: numbers of rows for each rank.
            receives: numbers of rows from each rank.
        """
        self.meet()
        arrived = rows.new_empty(sum(receives), *rows.shape[1:])
        outgoing, incoming = rows.split(list(sends)), arrived.split(list(receives))
        incoming[self.index].copy_(outgoing[self.index])
        self._send(outgoing, incoming)
        return arrived

    def gather(self, part: Tensor) -> Tensor:
        """All ranks' parts of a tensor on the CPU, joined along the first dimension, in rank order."""
        with torch.no_grad(), _C.HostAllocations():
            flat = part.detach().contiguous().view(-1)
            whole = torch.empty((self.size, flat.numel()), dtype=part.dtype, device="cpu")
            step = max(_PIECE_BYTES // part.itemsize, 1)
            for begin in range(0, flat.numel(), step):
                mine = flat[begin : begin + step].to(self._device)
                pieces = [mine if rank == self.index else torch.empty_like(mine) for rank in range(self.size)]
                self._send([mine] * self.size, pieces)
                for rank, piece in enumerate(pieces):
                    whole[rank, begin : begin + step] = piece.cpu()
            return whole.view(self.size * part.shape[0], *part.shape[1:])

    def _send(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        pairs = list(all_to_all_pairs(self.index, self.size))
        sends = [(to, outgoing[to]) for to, _ in pairs]
        receives = [(of, incoming[of]) for _, of in pairs]
        self._communicator.exchange(addresses(sends), addresses(receives))


class Exchanging(Protocol):
    """Interface of :class:`ExpertRanks` that a forward uses."""

    size: int

    def arrange(self, routing: Routing) -> Travel:
        """See :class:`ExpertRanks`."""
        ...

    def exchange(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """See :class:`ExpertRanks`."""
        ...


@torch.compiler.disable
def parallel_experts(
    module: nn.Module, ranks: Exchanging, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Experts of all ranks for this rank's tokens.

    Args:
        module: whose parameters are this rank's experts; ``num_experts`` counts all.
        ranks: that divide them.
        hidden: ``[tokens, hidden size]``.
        top_k_index: ``[tokens, chosen experts]``.
        top_k_weights: as ``top_k_index``.

    A compiled model has a graph break here: row counts are read on the host.
    """
    dtype = getattr(module, up_name(module)).dtype
    weights = top_k_weights if top_k_weights.dtype in (dtype, torch.float32) else top_k_weights.to(dtype)
    routing = Routing.of(top_k_index, module.num_experts)
    travel = ranks.arrange(routing)
    scale = 1 / ranks.size  # [Note: mean of gradients]
    rows = expert_rows.dispatch(hidden.to(dtype), routing.order, routing.positions, scale)
    rows = _Exchange.apply(rows, ranks, travel.sends, travel.receives)
    is_empty = len(rows) == 0
    if is_empty:  # parameters are used, and get a gradient, as on other ranks
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    rows = _Permute.apply(rows, travel.order, travel.inverse)
    if fp8_experts.multiplies_in_8_bits(module, rows, len(rows), len(travel.offsets)):
        up = getattr(module, up_name(module))
        rows = fp8_experts.products(rows, up, module.down_proj, travel.offsets, module.fp8_recipe)
    else:
        rows = products(module, rows, travel.experts, travel.offsets)
    rows = _Permute.apply(rows, travel.inverse, travel.order)
    rows = _Exchange.apply(rows[:0] if is_empty else rows, ranks, travel.receives, travel.sends)
    return expert_rows.combine(rows, weights, routing, scale).to(hidden.dtype)


@dataclasses.dataclass
class Travel:
    """Rows that this rank's experts get, and their order by expert."""

    sends: list[int]
    """Numbers of rows for each rank."""
    receives: list[int]
    """Numbers of rows from each rank."""
    order: Tensor
    """By row in the order of experts: its index among those received."""
    inverse: Tensor
    """The permutation that undoes ``order``."""
    experts: Tensor
    """By row in the order of experts: index of its expert among this rank's."""
    offsets: Tensor
    """int32, by expert of this rank: end of its rows."""

    @staticmethod
    def of(sends: list[int], receives: list[int], arriving: Tensor) -> Travel:
        """``arriving``: ``[ranks, experts of this rank]``, numbers of rows from each rank."""
        num_ranks, num_local = arriving.shape
        total = sum(receives)
        if total == 0:
            arriving = torch.zeros_like(arriving)
            arriving[-1, -1] = total = 1
        every = torch.arange(num_local, device=arriving.device).repeat(num_ranks)
        experts, order = torch.sort(every.repeat_interleave(arriving.flatten(), output_size=total), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(total, device=arriving.device)
        offsets = arriving.sum(0).cumsum(0).to(torch.int32)
        return Travel(sends, receives, order, inverse, experts, offsets)


class _Exchange(torch.autograd.Function):
    """Rows travel to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx, rows, ranks, sends, receives):
        ctx.travel = ranks, sends, receives
        return ranks.exchange(rows.contiguous(), sends, receives)

    @staticmethod
    def backward(ctx, grad):
        ranks, sends, receives = ctx.travel
        return ranks.exchange(grad.contiguous(), receives, sends), None, None, None


class _Permute(torch.autograd.Function):
    """``rows[order]``; ``inverse`` undoes it."""

    @staticmethod
    def forward(ctx, rows, order, inverse):
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None

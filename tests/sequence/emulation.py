"""A ring's ranks block by block in one process, dense attention in float64, and counts of kernels."""

import collections
import dataclasses
import math

import torch

from patrickstar.sequence.block import Partial, Rule, Total, attend, attend_backward, sinks_gradient
from patrickstar.sequence.kernels import KERNELS, Passes, Whole, token_major
from patrickstar.sequence.layout import Mode, Slice, positions_of_rank
from patrickstar.sequence.masking import make_masking
from patrickstar.sequence.ring import blocks_of_turn


@dataclasses.dataclass(frozen=True)
class Place:
    rank: int
    size: int


def rule_of(q, softcap=None, **options):
    given = {"causal": False, "window": None, "cu_seqlens": None, "length": None, "padding": None} | options
    masking = make_masking(**given, shape=(q.shape[0], q.shape[2]))
    return Rule(1 / math.sqrt(q.shape[-1]), masking, None, softcap)


def sharded_attention(q, k, v, grad, size, mode, rule, sinks=None):
    mode, length = Mode(mode), q.shape[2] // size
    here = [positions_of_rank(rank, size, length, mode).to(q.device) for rank in range(size)]

    def slices(tensor):
        return [token_major(tensor[:, :, places]) for places in here]

    q_of, k_of, v_of, grad_of = (slices(tensor) for tensor in (q, k, v, grad))
    k_totals, v_totals = ([Total(part) for part in parts] for parts in (k_of, v_of))
    outs, grad_qs, grad_sinks = [], [], []
    for rank in range(size):
        found, grad_q = Partial(q_of[rank], v.shape[-1]), Total(q_of[rank])
        for owner, block in _blocks(rank, size, mode, length, rule):
            attend(found, q_of[rank], k_of[owner], v_of[owner], block, rule)
        whole = Whole(grad_of[rank], *found.result(sinks))
        grad_sinks += [] if sinks is None else [sinks_gradient(whole, sinks)]
        for owner, block in _blocks(rank, size, mode, length, rule):
            totals = grad_q, k_totals[owner], v_totals[owner]
            attend_backward(totals, whole, q_of[rank], k_of[owner], v_of[owner], block, rule)
        outs.append(whole.out)
        grad_qs.append(grad_q.result())
    order = torch.argsort(torch.cat(here))
    parts = outs, grad_qs, [total.result() for total in k_totals], [total.result() for total in v_totals]
    return [torch.cat(part, dim=2)[:, :, order] for part in parts] + ([sum(grad_sinks)] if grad_sinks else [])


def _blocks(rank, size, mode, length, rule):
    for turn in range(size):
        for block in blocks_of_turn(Place(rank, size), mode, turn, length, rule):
            yield (rank - turn) % size, block


def dense_attention(q, k, v, grad, rule, sinks=None):
    leaves = [part.double().detach().requires_grad_() for part in (q, k, v, *([] if sinks is None else [sinks]))]
    q, k, v = leaves[0], *(part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in leaves[1:3])
    everything = Slice(0, q.shape[2])
    seen = rule.masking.mask(everything, everything, q.device)
    scores = q @ k.transpose(-1, -2) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, leaves[3][:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    out = torch.softmax(scores, dim=-1)[..., : k.shape[2]].nan_to_num(0.0) @ v
    out.backward(grad.double())
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def count_kernels(monkeypatch):
    """A counter of calls, `{(kernel, "forward" or "backward"): number}`."""
    calls = collections.Counter()

    def counted(kernel, name, function):
        def run(*args):
            calls[kernel, name] += 1
            return function(*args)

        return run

    for kernel, passes in KERNELS.items():
        both = [counted(kernel, name, function) for name, function in passes._asdict().items()]
        monkeypatch.setitem(KERNELS, kernel, Passes(*both))
    return calls

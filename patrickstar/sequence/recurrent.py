"""Recurrent layers over a sharded sequence: causal convolutions, and scans such as Mamba-2's and the gated delta rule.

A convolution needs the last ``kernel - 1`` tokens before each slice (its halo). All ranks all-gather the ends of their
slices, which are a few tokens.

A scan needs the state before its first token. Its heads are independent, so an all-to-all gives each rank some heads of
all tokens, and another one returns the outputs (Ulysses). Each rank then calls the model's own kernel once, on a whole
sequence. With fewer key heads or groups than ranks, several ranks get the same one. If the ranks do not divide the
heads, some heads are computed twice, and their second results are dropped.

State passing would send one [head_dim, state size] matrix per head and sequence. But each rank would wait for the ranks
before it, since kernels do not return how a slice transforms a state. docs/log.md compares both.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from patrickstar.sequence.division import Division, WholeTokens
from patrickstar.sequence.group import HybridGroup, SequenceGroup
from patrickstar.sequence.ulysses import Heads, HeadsForTokens, TokensForHeads, key_heads, repeated_heads

Group = SequenceGroup | HybridGroup


@dataclasses.dataclass(frozen=True)
class Scan:
    """Arguments of a scan's function, by layout. Arguments in no list are passed on.

    Attributes:
        by_head: [batch, tokens, heads, ...].
        by_key_head: [batch, tokens, key heads or groups, ...]; consecutive heads share one.
        per_head: [heads, ...], the same for all tokens.
    """

    by_head: tuple[str, ...]
    by_key_head: tuple[str, ...]
    per_head: tuple[str, ...]


def sharded_convolution(
    group: Group, division: Division, convolve: Callable[..., torch.Tensor], hidden: torch.Tensor,
    weight: torch.Tensor, *args: Any, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """A causal convolution of all ranks' tokens.

    Args:
        group: the ranks that share the sequence.
        division: its sharding.
        convolve: called with tokens of slices, each after its halo, and with the other arguments.
        hidden: [batch, channels, tokens of this rank].
        weight: [channels, kernel].
        args: further arguments, like ``kwargs``.

    Returns:
        [batch, channels, tokens of this rank].
    """
    halo, slices = weight.shape[-1] - 1, division.slices()
    kept = min(halo, slices[0].length)  # a slice may be shorter than a halo; then its end is all of it
    parts = hidden.chunk(len(slices), dim=2)
    ends = torch.cat([part[..., part.shape[2] - kept :] for part in parts], dim=2)
    of_ends = dataclasses.replace(division, length=kept * len(slices) * division.size)
    before = torch.nn.functional.pad(WholeTokens.apply(ends, group, of_ends, 2), (halo, 0))
    begins = [kept * (part.start // part.length) for part in slices]
    with_halos = [torch.cat([before[..., a : a + halo], part], dim=2) for a, part in zip(begins, parts, strict=True)]
    convolved = convolve(torch.cat(with_halos), weight, *args, **kwargs)[..., halo:]
    return torch.cat(convolved.chunk(len(slices)), dim=2)


def sharded_scan(group: Group, division: Division, scan: Scan, function: Callable[..., Any], *args: Any, **kwargs: Any):
    """A scan over all ranks' tokens.

    Args:
        group: the ranks that share the sequence.
        division: its sharding.
        scan: the layouts of the arguments.
        function: called with this rank's heads of whole sequences; returns outputs [batch, tokens, heads, ...], or a
            tuple that begins with them.
        args: of ``function``, with this rank's tokens, like ``kwargs``.

    Returns:
        What ``function`` returns, with the outputs of this rank's tokens; other results are None.
    """
    positional = list(inspect.signature(function).parameters)[: len(args)]
    given = {**dict(zip(positional, args, strict=True)), **kwargs}
    num_heads = given[scan.by_head[0]].shape[2]
    heads = repeated_heads(num_heads, group.size)
    mine = list(heads[group.rank])
    layouts = dict.fromkeys(scan.by_head, heads)
    if scan.by_key_head:
        shared = key_heads(heads, num_heads // given[scan.by_key_head[0]].shape[2])
        layouts |= dict.fromkeys(scan.by_key_head, shared)
    by_token = {name: given[name] for name in layouts if given.get(name) is not None}
    per_head = {name: given[name][mine] for name in scan.per_head if given.get(name) is not None}
    given |= per_head | _to_heads(by_token, layouts, group, division)
    # Kernels give positional arguments other names.
    result = function(*(given[name] for name in positional), **{name: given[name] for name in kwargs})
    out = _to_tokens(result[0] if isinstance(result, tuple) else result, group, division)[:, :, :num_heads]
    return (out, *(None for _ in result[1:])) if isinstance(result, tuple) else out


def _to_heads(
    tensors: Mapping[str, torch.Tensor], layouts: Mapping[str, Heads], group: Group, division: Division
) -> dict[str, torch.Tensor]:
    """[batch, tokens of this rank, heads, ...] to [batch, all tokens, heads of this rank, ...]. Tensors of one dtype
    and layout travel together.
    """
    together: dict[tuple[torch.dtype, Heads], list[str]] = {}
    for name, tensor in tensors.items():
        together.setdefault((tensor.dtype, layouts[name]), []).append(name)
    found = {}
    for (_, heads), names in together.items():
        flat = [tensors[name].reshape(*tensors[name].shape[:3], -1).transpose(1, 2) for name in names]
        whole = TokensForHeads.apply(torch.cat(flat, dim=-1), group, heads)
        whole = division.whole(whole.chunk(division.size, dim=2), dim=2).transpose(1, 2)
        for name, part in zip(names, whole.split([part.shape[-1] for part in flat], dim=-1), strict=True):
            found[name] = part.reshape(*part.shape[:3], *tensors[name].shape[3:]).contiguous()
    return found


def _to_tokens(out: torch.Tensor, group: Group, division: Division) -> torch.Tensor:
    """[batch, all tokens, heads of this rank, ...] to [batch, tokens of this rank, heads of all ranks, ...]."""
    flat = out.reshape(*out.shape[:2], out.shape[2], math.prod(out.shape[3:])).transpose(1, 2)
    ranks = [dataclasses.replace(division, rank=rank) for rank in range(division.size)]
    mine = HeadsForTokens.apply(torch.cat([rank.local(flat, 0.0, 2) for rank in ranks], dim=2), group)
    mine = mine.transpose(1, 2)
    return mine.reshape(*mine.shape[:3], *out.shape[3:]).contiguous()  # FalconH1 views it

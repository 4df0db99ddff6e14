"""Context-parallel attention for Hugging Face models.

    register_attention()
    model.set_attn_implementation(ATTENTION)
    with running(call):
        output = model(**arguments)            # of this rank

transformers knows :func:`sharded_attention`, and the function that makes its masks, by the name :data:`ATTENTION`.
While a sharded call runs, each mask that the model requests is a :class:`~patrickstar.sequence.shared_mask.SharedMask`,
so no mask of tokens x tokens elements is made. Masks that cannot be interpreted are refused, and so are masks from
elsewhere.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.sequence.attention import attention
from patrickstar.sequence.division import Division
from patrickstar.sequence.group import HybridGroup, SequenceGroup
from patrickstar.sequence.kernels import as_many_heads, sum_dtype
from patrickstar.sequence.masking import Padding
from patrickstar.sequence.shared_mask import SharedMask, reach_of

ATTENTION = "patrickstar_sequence"
"""Name among transformers' attention functions."""
_OTHER_SCORES = ("position_bias", "sinks")
"""Arguments that request scores that sequence parallelism does not compute."""


class LayerNames:
    """Names and indices of a model's modules."""

    def __init__(self, model: nn.Module):
        self.model = type(model).__name__
        self._names = {id(module): name for name, module in model.named_modules()}
        self._indices = {key: index for index, key in enumerate(self._names)}

    def index(self, module: nn.Module) -> int:
        """A module's index; it makes dropout differ between layers."""
        return self._indices.get(id(module), 0)

    def shown(self, module: nn.Module) -> str:
        """The module's name and class, for errors."""
        name = self._names.get(id(module))
        return f"{name} ({type(module).__name__})" if name else type(module).__name__


@dataclasses.dataclass(frozen=True, eq=False)
class ShardedCall:
    """State of one context-parallel call that attention needs."""

    group: SequenceGroup | HybridGroup
    division: Division
    documents: tuple[int, ...] | None
    padding: Padding | None
    seed: int
    layers: LayerNames
    positions: torch.Tensor
    """Positions of this rank's tokens in the whole sequence, [batch or 1, tokens]."""


_running: contextvars.ContextVar[ShardedCall | None] = contextvars.ContextVar("running", default=None)
_reached: contextvars.ContextVar[set[int] | None] = contextvars.ContextVar("reached", default=None)


@contextlib.contextmanager
def running(call: ShardedCall) -> Iterator[None]:
    """Context around the forward of ``call``."""
    token = _running.set(call)
    try:
        yield
    finally:
        _running.reset(token)


def running_call() -> ShardedCall | None:
    """The context-parallel call whose forward runs, or None."""
    return _running.get()


@contextlib.contextmanager
def noting_layers() -> Iterator[set[int]]:
    """Context that collects the ids of modules whose attention ran here; recomputation is not counted."""
    reached: set[int] = set()
    token = _reached.set(reached)
    try:
        yield reached
    finally:
        _reached.reset(token)


@functools.cache
def register_attention() -> None:
    """Registers :data:`ATTENTION` with transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(ATTENTION, sharded_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, shared_mask)


def shared_mask(**options: Any) -> torch.Tensor | None:
    """transformers' mask function; returns a :class:`SharedMask` in a context-parallel call. Some models request masks
    that no layer uses, so the layer that gets an unsupported mask refuses it.
    """
    call = _running.get()
    if call is None:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(**options)
    places = options.get("cache_position")  # transformers before 5.17
    num_queries = options["q_length"] if places is None else len(places)
    shape = (options["batch_size"], 1, num_queries, options["kv_length"])
    reach = reach_of(options["mask_function"], options.get("local_size"))
    return SharedMask(call, reach, shape, options["device"] if places is None else places.device)


def sharded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' signature: [batch, heads, tokens, head_dim] in, [batch, tokens, heads, head_dim] out.
    The mask decides, instead of ``sliding_window`` and ``is_causal``. ``s_aux`` are the sinks [heads].

    Raises:
        ValueError: the layer requests unsupported scores, keys of another sequence, or has a mask of its own.
    """
    note_layer(module)
    if not isinstance(attention_mask, SharedMask):
        kwargs |= {"scaling": scaling, "dropout": dropout, "is_causal": is_causal}
        return _whole_attention(module, query, key, value, attention_mask, softcap, s_aux, kwargs)
    call: ShardedCall = attention_mask.call
    check_layer(call.layers.shown(module), query, key, kwargs)
    reach = attention_mask.reach
    if reach is None:
        raise ValueError(
            f"{call.layers.shown(module)} has an attention mask that is neither causal, nor a window, nor all tokens "
            "of the sequence, and ranks that share a sequence know no other; leave sequence_parallel out"
        )
    out = attention(
        query,
        key,
        value,
        call.group,
        call.division.mode,
        causal=reach.is_causal,
        window=reach.window,
        cu_seqlens=call.documents if reach.is_causal else None,  # transformers finds documents only for causal masks
        length=call.division.length,
        padding=call.padding,
        dropout_p=dropout,
        seed=call.seed * 2**20 + call.layers.index(module),
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None


def check_layer(layer: str, query: torch.Tensor, key: torch.Tensor, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the layer, for unsupported scores or keys of another sequence."""
    for other in _OTHER_SCORES:
        if kwargs.get(other) is not None:
            raise ValueError(f"{layer} asks for {other}, which attention over a sharded sequence has not; leave "
                             "sequence_parallel out")  # fmt: skip
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{layer} has {query.shape[-2]} queries and {key.shape[-2]} keys; a sharded sequence attends to itself "
            "alone: call the model without a cache"
        )


def note_layer(module: nn.Module) -> None:
    """Tells :func:`noting_layers` that ``module`` mixes tokens here."""
    reached = _reached.get()
    if reached is not None:
        reached.add(id(module))


def _whole_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Attention in a call that is not context-parallel, or in its recomputation."""
    call = _running.get()
    if call is not None:
        brings = "no mask" if attention_mask is None else "a mask of its own"
        raise ValueError(
            f"{call.layers.shown(module)} brings {brings} to its attention, so that which keys a query sees is not "
            "known where ranks share a sequence; leave sequence_parallel out"
        )
    if _reached.get() is not None:
        check_layer(type(module).__name__, query, key, kwargs)
    if softcap is not None or sinks is not None:
        return _plain_attention(module, query, key, value, attention_mask, softcap, sinks, **kwargs)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _plain_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    is_causal: bool | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with a soft cap or sinks, which PyTorch's own does not have. ``mask`` is True where a query sees a key;
    None: causal as the module says.
    """
    dtype = sum_dtype(query)
    scores = query.to(dtype) @ as_many_heads(key, query).to(dtype).transpose(-1, -2)
    scores = scores * (1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(dtype).min)  # finite: a query may see no key
    if sinks is not None:
        columns = sinks.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, columns], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : key.shape[-2]]
    probabilities = torch.nn.functional.dropout(probabilities, p=dropout, training=module.training)
    out = (probabilities @ as_many_heads(value, query).to(dtype)).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None

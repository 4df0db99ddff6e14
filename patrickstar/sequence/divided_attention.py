"""Attention of models of Hugging Face in calls whose sequences ranks share.

    register_attention()
    model.set_attn_implementation(ATTENTION)
    with running(call):
        output = model(**arguments)            # of this rank

transformers knows :func:`divided_attention` by the name :data:`ATTENTION`, and what makes masks for it by the same one.
While a divided call runs, each mask that the model asks for is a
:class:`~patrickstar.sequence.shared_mask.SharedMask`, so that no mask of tokens x tokens elements is made. A mask that
is not understood is refused, and so is attention that gets another one.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.sequence.attention import attention
from patrickstar.sequence.division import Division
from patrickstar.sequence.group import HybridGroup, SequenceGroup
from patrickstar.sequence.masking import Padding
from patrickstar.sequence.shared_mask import SharedMask, reach_of

ATTENTION = "patrickstar_sequence"
"""Its name among transformers' attention functions."""
_OTHER_SCORES = ("softcap", "s_aux", "position_bias")
"""Arguments that ask for other scores than scaled products."""


class LayerNames:
    """The modules of a model by their names, and in their order."""

    def __init__(self, model: nn.Module):
        self.model = type(model).__name__
        self._names = {id(module): name for name, module in model.named_modules()}
        self._indices = {key: index for index, key in enumerate(self._names)}

    def index(self, module: nn.Module) -> int:
        """A number of each module: layers drop different probabilities."""
        return self._indices.get(id(module), 0)

    def shown(self, module: nn.Module) -> str:
        """The module's name and class, for errors."""
        name = self._names.get(id(module))
        return f"{name} ({type(module).__name__})" if name else type(module).__name__


@dataclasses.dataclass(frozen=True, eq=False)
class DividedCall:
    """One call of the model, as its attention must know it."""

    group: SequenceGroup | HybridGroup
    division: Division
    documents: tuple[int, ...] | None
    padding: Padding | None
    seed: int
    layers: LayerNames
    positions: torch.Tensor
    """Places of this rank's tokens in the whole sequence, [batch or 1, tokens]."""


_running: contextvars.ContextVar[DividedCall | None] = contextvars.ContextVar("running", default=None)
_reached: contextvars.ContextVar[set[int] | None] = contextvars.ContextVar("reached", default=None)


@contextlib.contextmanager
def running(call: DividedCall) -> Iterator[None]:
    """Around a forward of the model that ``call`` is of."""
    token = _running.set(call)
    try:
        yield
    finally:
        _running.reset(token)


def running_call() -> DividedCall | None:
    """The divided call whose forward runs."""
    return _running.get()


@contextlib.contextmanager
def noting_layers() -> Iterator[set[int]]:
    """Gives the ids of the modules whose attention was computed here meanwhile, recomputation aside."""
    reached: set[int] = set()
    token = _reached.set(reached)
    try:
        yield reached
    finally:
        _reached.reset(token)


@functools.cache
def register_attention() -> None:
    """Makes :data:`ATTENTION` known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(ATTENTION, divided_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, shared_mask)


def shared_mask(**options: Any) -> torch.Tensor | None:
    """The function that transformers calls for a mask; in a divided call it gives a :class:`SharedMask`. Some models
    ask for masks that no layer takes, so a mask that is not understood is refused by the layer that takes it.
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


def divided_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: [batch, heads, tokens, head_dim] in, [batch, tokens, heads, head_dim] out.
    The mask decides what ``sliding_window`` and ``is_causal`` decide for others.

    Raises:
        ValueError: the layer asks for scores of another kind, for keys of another sequence, or brings a mask of its
            own.
    """
    _note(module)
    if not isinstance(attention_mask, SharedMask):
        return _whole_attention(module, query, key, value, attention_mask, scaling, dropout, is_causal, kwargs)
    call: DividedCall = attention_mask.call
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
        cu_seqlens=call.documents if reach.is_causal else None,  # transformers finds documents for causal masks alone
        length=call.division.length,
        padding=call.padding,
        dropout_p=dropout,
        seed=call.seed * 2**20 + call.layers.index(module),
        scale=scaling,
    )
    return out.transpose(1, 2).contiguous(), None


def attention_for(mask: Any) -> Callable[..., tuple[torch.Tensor, None]] | None:
    """The function that computes attention with ``mask``; None: the sequences are not divided. For attention modules
    that do not ask ``AttentionInterface``.
    """
    return divided_attention if isinstance(mask, SharedMask) else None


def check_layer(layer: str, query: torch.Tensor, key: torch.Tensor, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the layer, where it asks for scores of another kind, or for other keys."""
    for other in _OTHER_SCORES:
        if kwargs.get(other) is not None:
            raise ValueError(f"{layer} asks for {other}, which attention over a divided sequence has not; leave "
                             "sequence_parallel out")  # fmt: skip
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{layer} has {query.shape[-2]} queries and {key.shape[-2]} keys; a divided sequence attends to itself "
            "alone: call the model without a cache"
        )


def _note(module: nn.Module) -> None:
    reached = _reached.get()
    if reached is not None:
        reached.add(id(module))


def _whole_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Attention in a call that is not divided, or in its recomputation."""
    call = _running.get()
    if call is not None:
        brings = "no mask" if attention_mask is None else "a mask of its own"
        raise ValueError(
            f"{call.layers.shown(module)} brings {brings} to its attention, so that which keys a query sees is not "
            "known where ranks share a sequence; leave sequence_parallel out"
        )
    if _reached.get() is not None:
        check_layer(type(module).__name__, query, key, kwargs)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)

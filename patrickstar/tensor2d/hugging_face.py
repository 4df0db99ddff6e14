"""Hugging Face's attention, MLPs and causal losses on a mesh, and plans for models.

A replacement takes and returns what the module did, so the model's own code goes on around it: masks, rotary positions,
residual streams, caches. transformers is not imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.tensor2d.attention import Attention, Heads, heads_here, qkv_parts
from patrickstar.tensor2d.cost import Choice, LayerShape, choose
from patrickstar.tensor2d.feed_forward import GatedFeedForward
from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.losses import CrossEntropy2D
from patrickstar.tensor2d.styles import (
    First,
    Head2D,
    Second,
    Slices2D,
    Spot,
    Style,
    Summa2D,
    first_linear,
    second_linear,
)

_GATED = ("llama", "qwen2")
_ATTENTION = ("sdpa", "eager")  # attention implementations whose masks have one value per query and key

AttentionFunction = Callable[..., tuple[torch.Tensor, Any]]
"""transformers' ``AttentionInterface`` function. Called with the module, queries, keys, values [b, heads, s, head_dim]
and a mask, and by name ``scaling``, ``dropout``, ``sliding_window``, ``is_causal`` and the model's own arguments.
Returns [b, s, heads, head_dim].
"""


def _own_attention(mask: torch.Tensor | None) -> AttentionFunction | None:
    return None


class HuggingFaceAttention(nn.Module):
    """Attention with the call signature of Hugging Face's models.

    Args:
        inner: with or without an output layer.
        layer_idx: this layer's index in caches.
        dropout: probability of dropout of outputs in training.
        sliding_window: tokens back that a query sees, its own included, as masks also say; None: all.

    Attributes:
        attention_for: maps a call's mask to the attention function, or to None for this module's own.
    """

    def __init__(
        self,
        inner: Attention | Heads,
        layer_idx: int | None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
    ):
        super().__init__()
        self.inner = inner
        self.layer_idx = layer_idx
        self.dropout = nn.Dropout(dropout)
        self.sliding_window = sliding_window
        self.attention_for: Callable[[torch.Tensor | None], AttentionFunction | None] = _own_attention

    def use_own_attention(self) -> None:
        """Resets :attr:`attention_for` to this module's own attention."""
        self.attention_for = _own_attention

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        encoder_hidden_states: torch.Tensor | None = None,
        **handed_down: Any,
    ) -> tuple[torch.Tensor, None]:
        """The output, and None for the probabilities. ``past_key_values`` is transformers' name before 5.24 for
        ``cache``.

        Raises:
            ValueError: cross-attention, or an encoder-decoder cache.
        """
        cache = past_key_values if cache is None else cache
        if encoder_hidden_states is not None or hasattr(cache, "cross_attention_cache"):
            raise ValueError("attention to another sequence has no two-dimensional form; train such a model otherwise")

        def extend(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return cache.update(k, v, self.layer_idx)

        function = self.attention_for(attention_mask)
        out = self.inner(
            hidden_states,
            mask=attention_mask,
            rotary=position_embeddings,
            extend=None if cache is None else extend,
            mix=None if function is None else functools.partial(self._mixed, function, attention_mask, handed_down),
        )
        return self.dropout(out), None

    def _mixed(
        self,
        function: AttentionFunction,
        mask: torch.Tensor | None,
        handed_down: Mapping[str, Any],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        heads = self.inner if isinstance(self.inner, Heads) else self.inner.attend
        return function(
            self,
            q,
            k,
            v,
            mask,
            scaling=heads.scale,
            dropout=heads.dropout if self.training else 0.0,
            sliding_window=self.sliding_window,
            is_causal=heads.is_causal,
            **handed_down,
        )[0]


class ShardedGPT2Attention:
    """GPT-2's attention."""

    def replace(self, module: Any, spot: Spot) -> nn.Module:  # noqa: D102
        _check_attention(module, spot)
        if module.is_cross_attention:
            raise spot.refused(module, "it attends to another sequence")
        width, heads = module.embed_dim, module.num_heads
        parts = qkv_parts(heads, heads, width // heads)
        attend = Heads(
            first_linear([module.c_attn], [f"{spot.name}.c_attn"], spot, parts),
            *heads_here(heads, heads, spot.group.place, spot.pairs.heads_by),
            width // heads,
            scale=module.scaling,
            dropout=module.attn_dropout.p,
        )
        out = second_linear(module.c_proj, f"{spot.name}.c_proj", spot)
        return HuggingFaceAttention(Attention(attend, out), module.layer_idx, module.resid_dropout.p)


class ShardedLlamaAttention:
    """Attention of Llama-like models: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, rotary positions, and nothing
    between them.
    """

    def replace(self, module: Any, spot: Spot) -> nn.Module:  # noqa: D102
        _check_attention(module, spot)
        config = module.config
        here = heads_here(config.num_attention_heads, config.num_key_value_heads, spot.group.place, spot.pairs.heads_by)
        projections = [module.q_proj, module.k_proj, module.v_proj]
        attend = Heads(
            first_linear(projections, [f"{spot.name}.{part}_proj" for part in "qkv"], spot),
            *here,
            module.head_dim,
            scale=module.scaling,
            dropout=module.attention_dropout,
        )
        out = second_linear(module.o_proj, f"{spot.name}.o_proj", spot)
        window = getattr(module, "sliding_window", None)
        return HuggingFaceAttention(Attention(attend, out), module.layer_idx, sliding_window=window)


class ShardedBertSelfAttention:
    """BERT's attention; its output layer is a separate module."""

    def replace(self, module: Any, spot: Spot) -> nn.Module:  # noqa: D102
        _check_attention(module, spot)
        heads = module.num_attention_heads
        names = [f"{spot.name}.{part}" for part in ("query", "key", "value")]
        attend = Heads(
            first_linear([module.query, module.key, module.value], names, spot),
            *heads_here(heads, heads, spot.group.place, spot.pairs.heads_by),
            module.all_head_size // heads,
            is_causal=module.is_causal,
            scale=module.scaling,
            dropout=module.dropout.p,
        )
        return HuggingFaceAttention(attend, module.layer_idx)


class ShardedLlamaMLP:
    """MLP of Llama-like models: ``gate_proj``, ``up_proj``, ``down_proj``."""

    def replace(self, module: Any, spot: Spot) -> nn.Module:  # noqa: D102
        names = [f"{spot.name}.{part}_proj" for part in ("gate", "up")]
        gate_up = first_linear([module.gate_proj, module.up_proj], names, spot)
        down = second_linear(module.down_proj, f"{spot.name}.down_proj", spot)
        return GatedFeedForward(gate_up, down, module.act_fn)


class TokenLoss:
    """Replaces a language model's ``loss_function``: the mean over the whole batch, with labels of the same tokens
    (masked language models).
    """

    def __init__(self, vocabulary: int, group: MeshGroup):
        self._vocabulary, self._group = vocabulary, group

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | float | None = None,
        ignore_index: int = -100,
        **_: Any,
    ) -> torch.Tensor:
        """Same arguments as transformers' losses; ``num_items_in_batch`` counts labels of all rows.

        Raises:
            ValueError: there are no labels.
        """
        if labels is None:
            raise ValueError("a loss needs labels")
        group = self._group
        # whole logits, since autograd is off: each column computes the whole loss
        if logits.shape[-1] == self._vocabulary:
            group = MeshGroup(group.along_rows, Line(), group.world_group)
        loss = CrossEntropy2D(self._vocabulary, group, ignore_index=ignore_index)
        return loss(logits, labels.reshape(logits.shape[:-1]).to(logits.device), num_items_in_batch)

    def attach(self, model: Any) -> None:
        """Makes ``model`` compute its loss here. Calls without labels are unchanged."""
        aside = _LabelsAside()
        model.loss_function = self
        model.register_forward_pre_hook(aside.take, with_kwargs=True)
        model.register_forward_hook(aside.give)


class CausalLoss(TokenLoss):
    """Loss of a causal language model: labels are shifted to the tokens before them."""

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Same arguments as ``ForCausalLMLoss`` of transformers; ``num_items_in_batch`` counts labels of all rows.

        Raises:
            ValueError: there are no labels.
        """
        if shift_labels is None and labels is not None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return super().__call__(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)

    def attach(self, model: Any) -> None:
        """Sets the ``loss_function`` that ``model``'s forward calls."""
        model.loss_function = self


class _LabelsAside:
    """For models whose forward computes the loss itself, from whole logits. Hooks withhold the labels and add the loss
    of the model's current ``loss_function`` to the output.
    """

    def __init__(self) -> None:
        self._given: dict[str, Any] = {}

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Removes labels from the keyword arguments and keeps them until the call ends."""
        others = dict(kwargs)
        self._given = {name: others.pop(name) for name in ("labels", "num_items_in_batch") if name in others}
        return args, others

    def give(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Adds the loss to the output if there were labels."""
        given, self._given = self._given, {}
        if given.get("labels") is None:
            return output
        is_tuple = isinstance(output, tuple)
        loss = module.loss_function(output[0] if is_tuple else output.logits, **given)
        return (loss, *output) if is_tuple else type(output)(**{**output, "loss": loss})


def layer_shape(config: Any) -> LayerShape:
    """Layer widths of the model that a transformers configuration describes, for
    :func:`~patrickstar.tensor2d.cost.choose`.

    Raises:
        ValueError: there is no plan for the model type.
    """
    if config.model_type not in PLANS:
        raise ValueError(
            f"model type {config.model_type!r} has no plan for a mesh; there are {', '.join(sorted(PLANS))}"
        )
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    return LayerShape(
        hidden=hidden,
        intermediate=config.n_inner if config.model_type == "gpt2" else config.intermediate_size,
        queries=heads * head_dim,
        keys=getattr(config, "num_key_value_heads", heads) * head_dim,
        is_gated=config.model_type in _GATED,
    )


def choose_for(config: Any, **options: Any) -> Choice:
    """:func:`~patrickstar.tensor2d.cost.choose` for a transformers configuration; ``options`` are its other arguments.

    Raises:
        ValueError: there is no plan for the model type, or no mesh divides the layer.
    """
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return choose(layer_shape(config), heads=heads, key_heads=key_heads, **options)


def _check_attention(module: Any, spot: Spot) -> None:
    used = module.config._attn_implementation
    if used not in _ATTENTION:
        raise spot.refused(
            module, f"its attention is {used!r}, whose masks have another form; load it with attn_implementation='sdpa'"
        )


_LLAMA: dict[str, Style] = {
    "embed_tokens": Summa2D(),
    "layers.*.input_layernorm": Summa2D(),
    "layers.*.self_attn": ShardedLlamaAttention(),
    "layers.*.post_attention_layernorm": Summa2D(),
    "layers.*.mlp": ShardedLlamaMLP(),
    "norm": Summa2D(),
    "lm_head": Head2D(),
}

PLANS: dict[str, dict[str, Style]] = {
    "gpt2": {
        "wte": Summa2D(),
        "wpe": Slices2D(),
        "h.*.ln_1": Summa2D(),
        "h.*.attn": ShardedGPT2Attention(),
        "h.*.ln_2": Summa2D(),
        "h.*.mlp.c_fc": First(),
        "h.*.mlp.c_proj": Second(),
        "ln_f": Summa2D(),
        "lm_head": Head2D(),
    },
    "bert": {
        "embeddings.word_embeddings": Summa2D(),
        "embeddings.position_embeddings": Slices2D(),
        "embeddings.token_type_embeddings": Slices2D(),
        "embeddings.LayerNorm": Summa2D(),
        "encoder.layer.*.attention.self": ShardedBertSelfAttention(),
        "encoder.layer.*.attention.output.dense": Second(),
        "encoder.layer.*.attention.output.LayerNorm": Summa2D(),
        "encoder.layer.*.intermediate.dense": First(),
        "encoder.layer.*.output.dense": Second(),
        "encoder.layer.*.output.LayerNorm": Summa2D(),
        "pooler.dense": Summa2D(),
        "cls.predictions.transform.dense": Summa2D(),
        "cls.predictions.transform.LayerNorm": Summa2D(),
        "cls.predictions.decoder": Head2D(),
    },
    "llama": _LLAMA,
    "qwen2": _LLAMA,
}
"""By ``config.model_type``."""

SHARDED = {
    kind: {name: style for name, style in plan.items() if name != "pooler.dense"} for kind, plan in PLANS.items()
}
"""The parts of these plans, other than attention, that are token-wise; used in one dimension
(:mod:`patrickstar.tensor2d.sharded_models`). BERT's pooler takes the first token of each sequence and is left out.
"""

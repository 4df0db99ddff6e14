"""Attention and MLPs of Hugging Face's models on a mesh, the losses of their causal models, and plans for them.

What replaces a module takes and returns what that one does, so that the model's own code goes on around it: masks,
rotary positions, residual streams, caches. Nothing here imports transformers.
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
_ATTENTION = ("sdpa", "eager")  # those that give masks with a value for each query and key

AttentionFunction = Callable[..., tuple[torch.Tensor, Any]]
"""As those of transformers' ``AttentionInterface``: called with the module, queries, keys, values [b, heads, s,
head_dim] and a mask, and by name ``scaling``, ``dropout``, ``sliding_window``, ``is_causal`` and what the model hands
down; gives [b, s, heads, head_dim].
"""


def _own_attention(mask: torch.Tensor | None) -> AttentionFunction | None:
    return None


class HuggingFaceAttention(nn.Module):
    """Called as attention of Hugging Face's models is.

    Args:
        inner: with a layer behind the heads, or without one.
        layer_idx: of this layer in caches.
        dropout: share of outputs that are dropped in training.
        sliding_window: tokens back that a query sees, its own included, which masks say too; None: all.

    Attributes:
        attention_for: of the mask that the model hands down in a call: the function that computes attention with it,
            or None for that of this module.
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
        """In all calls, as at first."""
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
        """The output, and None for the probabilities. ``past_key_values`` is what transformers before 5.24 calls
        ``cache``.

        Raises:
            ValueError: another sequence is attended to, or the cache is one of encoders.
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


class DividedGPT2Attention:
    """The attention of GPT-2."""

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


class DividedLlamaAttention:
    """The attention of Llama and of models like it: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, rotary positions,
    and nothing between them.
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


class DividedBertSelfAttention:
    """The attention of BERT, whose output layer is a module of its own."""

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


class DividedLlamaMLP:
    """The MLP of Llama and of models like it: ``gate_proj``, ``up_proj``, ``down_proj``."""

    def replace(self, module: Any, spot: Spot) -> nn.Module:  # noqa: D102
        names = [f"{spot.name}.{part}_proj" for part in ("gate", "up")]
        gate_up = first_linear([module.gate_proj, module.up_proj], names, spot)
        down = second_linear(module.down_proj, f"{spot.name}.down_proj", spot)
        return GatedFeedForward(gate_up, down, module.act_fn)


class TokenLoss:
    """In the place of ``loss_function`` of a language model: the mean over the whole batch, of labels that are those of
    their tokens (a masked language model's).
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
        """As the losses of transformers; ``num_items_in_batch`` counts labels of all rows.

        Raises:
            ValueError: there are no labels.
        """
        if labels is None:
            raise ValueError("a loss needs labels")
        group = self._group
        if logits.shape[-1] == self._vocabulary:  # whole, since autograd is off: each column computes all of it
            group = MeshGroup(group.along_rows, Line(), group.everybody)
        loss = CrossEntropy2D(self._vocabulary, group, ignore_index=ignore_index)
        return loss(logits, labels.reshape(logits.shape[:-1]).to(logits.device), num_items_in_batch)

    def attach(self, model: Any) -> None:
        """``model`` computes its loss so. What it gives without labels is as before."""
        aside = _LabelsAside()
        model.loss_function = self
        model.register_forward_pre_hook(aside.take, with_kwargs=True)
        model.register_forward_hook(aside.give)


class CausalLoss(TokenLoss):
    """Of a causal language model, whose labels are those of the tokens before them."""

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
        """As ``ForCausalLMLoss`` of transformers; ``num_items_in_batch`` counts labels of all rows.

        Raises:
            ValueError: there are no labels.
        """
        if shift_labels is None and labels is not None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return super().__call__(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)

    def attach(self, model: Any) -> None:
        """``model`` computes its loss so: its forward calls its ``loss_function``."""
        model.loss_function = self


class _LabelsAside:
    """Of a model whose forward makes its loss itself, of whole logits: it never sees labels, and what it gives gets the
    loss of the model's ``loss_function`` afterwards, whatever that is by then.
    """

    def __init__(self) -> None:
        self._given: dict[str, Any] = {}

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Keeps labels, which are given by name, until the call is over."""
        others = dict(kwargs)
        self._given = {name: others.pop(name) for name in ("labels", "num_items_in_batch") if name in others}
        return args, others

    def give(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        """The output with a loss, where there were labels."""
        given, self._given = self._given, {}
        if given.get("labels") is None:
            return output
        is_tuple = isinstance(output, tuple)
        loss = module.loss_function(output[0] if is_tuple else output.logits, **given)
        return (loss, *output) if is_tuple else type(output)(**{**output, "loss": loss})


def layer_shape(config: Any) -> LayerShape:
    """Of a layer of the model that a configuration of transformers describes, for
    :func:`~patrickstar.tensor2d.cost.choose`.

    Raises:
        ValueError: there is no plan for such models.
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
    """:func:`~patrickstar.tensor2d.cost.choose` for a layer of the model that a configuration of transformers
    describes; ``options``: its arguments, but for heads.

    Raises:
        ValueError: there is no plan for such models, or nothing divides the layer.
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
    "layers.*.self_attn": DividedLlamaAttention(),
    "layers.*.post_attention_layernorm": Summa2D(),
    "layers.*.mlp": DividedLlamaMLP(),
    "norm": Summa2D(),
    "lm_head": Head2D(),
}

PLANS: dict[str, dict[str, Style]] = {
    "gpt2": {
        "wte": Summa2D(),
        "wpe": Slices2D(),
        "h.*.ln_1": Summa2D(),
        "h.*.attn": DividedGPT2Attention(),
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
        "encoder.layer.*.attention.self": DividedBertSelfAttention(),
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
"""Of these, what takes each token by itself, but for attention: in one dimension too
(:mod:`patrickstar.tensor2d.sharded_models`). BERT's pooler takes the first token of each sequence.
"""

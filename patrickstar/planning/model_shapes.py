"""Figures that configurations of several known models share. Standard library only."""

from __future__ import annotations

from typing import Any

Known = dict[str, tuple[str, dict[str, Any]]]
"""Name -> configuration class of transformers, and its arguments."""

TIED: dict[str, Any] = {"tie_word_embeddings": True}
_GEMMA_VOCAB = 262208


def decoder(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """Arguments of a decoder with grouped-query attention; ``more`` adds to them or replaces them."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    } | more


def gemma3(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **more: Any) -> dict[str, Any]:
    """Arguments of a Gemma 3 text decoder."""
    vocab, head_dim = more.pop("vocab", _GEMMA_VOCAB), more.pop("head_dim", 256)
    return decoder(hidden, layers, heads, kv_heads, intermediate, vocab, head_dim=head_dim, **TIED, **more)


def experts(num: int, each_token: int, intermediate: int, **more: Any) -> dict[str, Any]:
    """Arguments of Qwen's mixtures."""
    return {
        "num_experts": num,
        "num_experts_per_tok": each_token,
        "moe_intermediate_size": intermediate,
        "norm_topk_prob": True,
    } | more

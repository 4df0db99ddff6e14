"""Well-known models: figures of their public configurations, as arguments of transformers' classes."""

from __future__ import annotations

from typing import Any


def _decoder(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **more: Any
) -> dict[str, Any]:
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


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": 50257, "n_positions": 1024}


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
# Name -> configuration class and arguments.
KNOWN_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2-7b": ("LlamaConfig", _decoder(4096, 32, 32, 32, 11008, 32000, max_position_embeddings=4096)),
    "llama-2-13b": ("LlamaConfig", _decoder(5120, 40, 40, 40, 13824, 32000, max_position_embeddings=4096)),
    "llama-3.1-8b": ("LlamaConfig", _decoder(4096, 32, 32, 8, 14336, 128256)),
    "llama-3.1-70b": ("LlamaConfig", _decoder(8192, 80, 64, 8, 28672, 128256)),
    "llama-3.2-1b": ("LlamaConfig", _decoder(2048, 16, 32, 8, 8192, 128256, head_dim=64, **_TIED)),
    "llama-3.2-3b": ("LlamaConfig", _decoder(3072, 28, 24, 8, 8192, 128256, head_dim=128, **_TIED)),
    "mistral-7b": ("MistralConfig", _decoder(4096, 32, 32, 8, 14336, 32768, sliding_window=None)),
    "qwen2.5-0.5b": ("Qwen2Config", _decoder(896, 24, 14, 2, 4864, 151936, **_TIED)),
    "qwen2.5-1.5b": ("Qwen2Config", _decoder(1536, 28, 12, 2, 8960, 151936, **_TIED)),
    "qwen2.5-3b": ("Qwen2Config", _decoder(2048, 36, 16, 2, 11008, 151936, **_TIED)),
    "qwen2.5-7b": ("Qwen2Config", _decoder(3584, 28, 28, 4, 18944, 152064)),
    "qwen2.5-14b": ("Qwen2Config", _decoder(5120, 48, 40, 8, 13824, 152064)),
    "qwen2.5-32b": ("Qwen2Config", _decoder(5120, 64, 40, 8, 27648, 152064)),
    "qwen2.5-72b": ("Qwen2Config", _decoder(8192, 80, 64, 8, 29568, 152064)),
    "qwen3-8b": ("Qwen3Config", _decoder(4096, 36, 32, 8, 12288, 151936, head_dim=128)),
    "gemma-2-2b": ("Gemma2Config", _decoder(2304, 26, 8, 4, 9216, 256000, head_dim=256, **_TIED)),
    "gemma-2-9b": ("Gemma2Config", _decoder(3584, 42, 16, 8, 14336, 256000, head_dim=256, **_TIED)),
    "gemma-2-27b": ("Gemma2Config", _decoder(4608, 46, 32, 16, 36864, 256000, head_dim=128, **_TIED)),
    "gpt2": ("GPT2Config", _gpt2(768, 12, 12)),
    "gpt2-medium": ("GPT2Config", _gpt2(1024, 24, 16)),
    "gpt2-large": ("GPT2Config", _gpt2(1280, 36, 20)),
    "gpt2-xl": ("GPT2Config", _gpt2(1600, 48, 25)),
}
# Names used by the benchmarks.
OTHER_NAMES = {"llama-8b": "llama-3.1-8b", "qwen-14b": "qwen2.5-14b"}

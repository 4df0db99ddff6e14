"""Well-known mixtures of experts that read text. Standard library only."""

from __future__ import annotations

from typing import Any

from patrickstar.planning.model_shapes import TIED, Known, decoder, experts


def _gpt_oss(layers: int, num_experts: int) -> dict[str, Any]:
    return decoder(2880, layers, 64, 8, 2880, 201088, head_dim=64, num_local_experts=num_experts, num_experts_per_tok=4)


def _glm(hidden: int, layers: int, intermediate: int, num_experts: int, each: int, dense: int, **more: Any) -> Any:
    sizes = {"n_routed_experts": num_experts, "moe_intermediate_size": each, "first_k_dense_replace": dense}
    more |= {"head_dim": 128, "attention_bias": True, "n_shared_experts": 1, "num_experts_per_tok": 8}
    return decoder(hidden, layers, 96, 8, intermediate, 151552, **sizes, **more)


def _granite(hidden: int, heads: int, kv_heads: int, intermediate: int, shared: int, **more: Any) -> dict[str, Any]:
    """40 layers, of which 5, 15, 25 and 35 attend and the others are Mamba-2."""
    kinds = ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)]
    mamba = {"mamba_n_heads": hidden // 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
    more |= {"shared_intermediate_size": shared, "layer_types": kinds, **mamba, **TIED}
    return decoder(hidden, 40, heads, kv_heads, intermediate, 100352, **more)


_JAMBA: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 2, "max_position_embeddings": 262144}
_DEEPSEEK_V3: dict[str, Any] = {"max_position_embeddings": 163840}  # the others are the class's defaults
_QWEN3_NEXT: dict[str, Any] = {"max_position_embeddings": 262144}

MIXTURES: Known = {
    "mixtral-8x7b": ("MixtralConfig", decoder(4096, 32, 32, 8, 14336, 32000, sliding_window=None)),
    "mixtral-8x22b": ("MixtralConfig", decoder(6144, 56, 48, 8, 16384, 32768, sliding_window=None)),
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig", decoder(2048, 48, 32, 4, 6144, 151936, head_dim=128, **experts(128, 8, 768)),
    ),
    "qwen3-235b-a22b": (
        "Qwen3MoeConfig", decoder(4096, 94, 64, 4, 12288, 151936, head_dim=128, **experts(128, 8, 1536)),
    ),
    "qwen3-next-80b-a3b": ("Qwen3NextConfig", _QWEN3_NEXT),
    "gpt-oss-20b": ("GptOssConfig", _gpt_oss(24, 32)),
    "gpt-oss-120b": ("GptOssConfig", _gpt_oss(36, 128)),
    "deepseek-v3": ("DeepseekV3Config", _DEEPSEEK_V3),
    "glm-4.5-air": ("Glm4MoeConfig", _glm(4096, 46, 10944, 128, 1408, 1)),
    "glm-4.5": ("Glm4MoeConfig", _glm(5120, 92, 12288, 160, 1536, 3, use_qk_norm=True)),
    "olmoe-1b-7b": (
        "OlmoeConfig", decoder(2048, 16, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8,
                               max_position_embeddings=4096),
    ),
    "jamba-mini": ("JambaConfig", decoder(4096, 32, 32, 8, 14336, 65536, **_JAMBA)),
    "jamba-large": ("JambaConfig", decoder(8192, 72, 64, 8, 24576, 65536, **_JAMBA)),
    "granite-4.0-h-micro": ("GraniteMoeHybridConfig", _granite(2048, 32, 8, 8192, 8192, num_local_experts=0)),
    "granite-4.0-h-tiny": (
        "GraniteMoeHybridConfig", _granite(1536, 12, 4, 512, 1024, num_local_experts=64, num_experts_per_tok=6),
    ),
    "granite-4.0-h-small": (
        "GraniteMoeHybridConfig", _granite(4096, 32, 8, 768, 1536, num_local_experts=72, num_experts_per_tok=10),
    ),
}  # fmt: skip
"""Layers that predict several tokens ahead (DeepSeek-V3, GLM-4.5, Qwen3-Next) are not in transformers' models."""

OTHER_MIXTURES = {
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-r1": "deepseek-v3",
    "glm-4.6": "glm-4.5",
    "jamba": "jamba-mini",
    "ai21-jamba-mini-1.7": "jamba-mini",
    "ai21-jamba-mini-1.6": "jamba-mini",
    "ai21-jamba-1.5-mini": "jamba-mini",
    "ai21-jamba-large-1.7": "jamba-large",
    "ai21-jamba-large-1.6": "jamba-large",
    "ai21-jamba-1.5-large": "jamba-large",
    "olmoe": "olmoe-1b-7b",
}
"""Further names."""

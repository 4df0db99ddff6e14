"""Well-known vision-language models. Standard library only."""

from __future__ import annotations

from typing import Any

from patrickstar.planning.model_shapes import TIED, Known, decoder, experts, gemma3


def _qwen2_5_vl(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, *, tower: int, tied: bool = False
) -> tuple[str, dict[str, Any]]:
    vocab = 151936 if tied else 152064
    text = decoder(hidden, layers, heads, kv_heads, intermediate, vocab, tie_word_embeddings=tied)
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": tower, "num_heads": 16, "out_hidden_size": hidden}
    return "Qwen2_5_VLConfig", {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


def _qwen3_vl(hidden: int, *sizes: int, small_tower: bool = False, tied: bool = False, **mixture: Any) -> Any:
    text = decoder(hidden, *sizes, 151936, head_dim=128, tie_word_embeddings=tied, **mixture)
    vision: dict[str, Any] = {"out_hidden_size": hidden}
    if small_tower:
        vision |= {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
    kind = "Qwen3VLMoeConfig" if mixture else "Qwen3VLConfig"
    return kind, {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


def _siglip(image_size: int, **more: Any) -> dict[str, Any]:
    """The vision tower SigLIP So400m with patches of 14 pixels."""
    return {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": image_size,
        "patch_size": 14,
    } | more


def _gemma(text: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    tower = _siglip(896, vision_use_head=False, model_type="siglip_vision_model")
    return "Gemma3Config", {"text_config": text, "vision_config": tower, **TIED}


def _smolvlm(text: dict[str, Any], scale_factor: int, tower: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    text = {"model_type": "llama", **text}
    return "SmolVLMConfig", {"text_config": text, "vision_config": tower, "scale_factor": scale_factor}


def _internvl(*sizes: int, kind: str = "qwen2", large_tower: bool = False, **more: Any) -> Any:
    text = decoder(*sizes, 151674 if kind == "qwen2" else 151936, model_type=kind, **more)
    vision: dict[str, Any] = {}
    if large_tower:
        vision = {"hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25, "intermediate_size": 12800,
                  "use_qk_norm": True, "norm_type": "rms_norm"}  # fmt: skip
    return "InternVLConfig", {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}


def _llava(*sizes: int) -> tuple[str, dict[str, Any]]:
    text = decoder(*sizes, 32064, model_type="llama", max_position_embeddings=4096)
    return "LlavaConfig", {"text_config": text}


def _llama4(num_experts: int, step: int) -> tuple[str, dict[str, Any]]:
    text = {"num_local_experts": num_experts, "interleave_moe_layer_step": step, "max_position_embeddings": 1048576}
    vision = {"hidden_size": 1408, "vision_output_dim": 4096, "image_size": 336}
    return "Llama4Config", {"text_config": text, "vision_config": vision}


_SMOL_TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
_SMALL_3 = decoder(5120, 40, 32, 8, 32768, 131072, head_dim=128, sliding_window=None, model_type="mistral")
_GEMMA3N = {"vocab_size_per_layer_input": 262144, **TIED}

VISION_MODELS: Known = {
    "qwen2.5-vl-3b": _qwen2_5_vl(2048, 36, 16, 2, 11008, tower=3420, tied=True),
    "qwen2.5-vl-7b": _qwen2_5_vl(3584, 28, 28, 4, 18944, tower=3420),
    "qwen2.5-vl-32b": _qwen2_5_vl(5120, 64, 40, 8, 27648, tower=3456),
    "qwen2.5-vl-72b": _qwen2_5_vl(8192, 80, 64, 8, 29568, tower=3456),
    "qwen3-vl-2b": _qwen3_vl(2048, 28, 16, 8, 6144, small_tower=True, tied=True),
    "qwen3-vl-4b": _qwen3_vl(2560, 36, 32, 8, 9728, small_tower=True, tied=True),
    "qwen3-vl-8b": _qwen3_vl(4096, 36, 32, 8, 12288),
    "qwen3-vl-32b": _qwen3_vl(5120, 64, 64, 8, 25600),
    "qwen3-vl-30b-a3b": _qwen3_vl(2048, 48, 32, 4, 6144, **experts(128, 8, 768)),
    "qwen3-vl-235b-a22b": _qwen3_vl(4096, 94, 64, 4, 12288, **experts(128, 8, 1536)),
    "qwen3.5-35b-a3b": ("Qwen3_5MoeConfig", {"vision_config": {"out_hidden_size": 2048}}),
    "llama-4-scout": _llama4(16, 1),
    "llama-4-maverick": _llama4(128, 2),
    "llava-1.5-7b": _llava(4096, 32, 32, 32, 11008),
    "llava-1.5-13b": _llava(5120, 40, 40, 40, 13824),
    "smolvlm-256m": _smolvlm(decoder(576, 30, 9, 3, 1536, 49280), 4, _SMOL_TOWER),
    "smolvlm-500m": _smolvlm(decoder(960, 32, 15, 5, 2560, 49280), 4, _SMOL_TOWER),
    "smolvlm-2.2b": _smolvlm(decoder(2048, 24, 32, 32, 8192, 49155), 3, _siglip(384)),
    "internvl3-1b": _internvl(896, 24, 14, 2, 4864),
    "internvl3-2b": _internvl(1536, 28, 12, 2, 8960),
    "internvl3-8b": _internvl(3584, 28, 28, 4, 18944),
    "internvl3-14b": _internvl(5120, 48, 40, 8, 13824),
    "internvl3-38b": _internvl(5120, 64, 40, 8, 27648, large_tower=True),
    "internvl3-78b": _internvl(8192, 80, 64, 8, 29568, large_tower=True),
    "internvl3.5-8b": _internvl(4096, 36, 32, 8, 12288, kind="qwen3", head_dim=128),
    "gemma-3-4b": _gemma(gemma3(2560, 34, 8, 4, 10240)),
    "gemma-3-12b": _gemma(gemma3(3840, 48, 16, 8, 15360)),
    "gemma-3-27b": _gemma(gemma3(5376, 62, 32, 16, 21504, head_dim=128)),
    "gemma-3n-e2b": (
        "Gemma3nTextConfig", {"num_hidden_layers": 30, "intermediate_size": 8192, "num_kv_shared_layers": 10,
                              "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, **_GEMMA3N},
    ),
    "gemma-3n-e4b": ("Gemma3nTextConfig", _GEMMA3N),
    "mistral-small-3.1-24b": ("Mistral3Config", {"text_config": _SMALL_3, "tie_word_embeddings": False}),
}  # fmt: skip
"""Gemma 3n is its decoder alone: transformers builds its vision tower with the package timm."""

OTHER_VISION_MODELS = {
    "llama-4-scout-17b-16e": "llama-4-scout",
    "llama-4-maverick-17b-128e": "llama-4-maverick",
    "smolvlm": "smolvlm-2.2b",
    "smolvlm2-2.2b": "smolvlm-2.2b",
    "smolvlm2-256m": "smolvlm-256m",
    "smolvlm2-256m-video": "smolvlm-256m",
    "smolvlm2-500m": "smolvlm-500m",
    "smolvlm2-500m-video": "smolvlm-500m",
    "mistral-small-3.1": "mistral-small-3.1-24b",
    "mistral-small-3.2": "mistral-small-3.1-24b",
    "mistral-small-3.2-24b": "mistral-small-3.1-24b",
}
"""Further names."""

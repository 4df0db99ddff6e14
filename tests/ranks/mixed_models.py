"""Small mixtures of experts and vision-language models of transformers, with batches without images or for other
experts.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCAB, LENGTH, IMAGE_TOKEN = 99, 12, 95
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 3,
}
QWEN_VISION = {"num_heads": 4, "in_channels": 3, "patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2}
IMAGE = {"image_token_id": IMAGE_TOKEN}
IMAGE_INDEX = {**IMAGE, "image_token_index": IMAGE_TOKEN}
DELTA_NET = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
SHARED_EXPERT = {"shared_expert_intermediate_size": 16}
QWEN_TOKENS = {**IMAGE, "vision_start_token_id": 96, "vision_end_token_id": 97, "video_token_id": 98}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
SIGLIP = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    **QWEN_VISION,
}
DEEPSTACK = {**QWEN3_VISION, "deepstack_visual_indexes": [0]}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
LLAMA4 = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "moe_layers": [0, 1]}

VISION_MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Llava": (
        {
            "vision_config": {"model_type": "clip_vision_model", **VISION, "projection_dim": 32},
            "text_config": {"model_type": "llama", **TEXT},
            "vision_feature_layer": -1,
            **IMAGE_INDEX,
        },
        4,
    ),
    "Gemma3": (
        {
            "vision_config": SIGLIP,
            "text_config": {**TEXT, "sliding_window": 8},
            "mm_tokens_per_image": 4,
            "boi_token_index": 96,
            "eoi_token_index": 97,
            **IMAGE_INDEX,
        },
        4,
    ),
    "PaliGemma": (
        {
            "vision_config": {**SIGLIP, "projection_dim": 32},
            "text_config": {"model_type": "gemma", **TEXT},
            "projection_dim": 32,
            **IMAGE_INDEX,
        },
        4,
    ),
    "AyaVision": (
        {
            "vision_config": SIGLIP,
            "text_config": {"model_type": "cohere2", **TEXT},
            "downsample_factor": 2,
            "vision_feature_layer": -1,
            **IMAGE_INDEX,
        },
        1,
    ),
    "InternVL": (
        {
            "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [8, 8]},
            "text_config": {"model_type": "qwen2", **TEXT},
            "downsample_ratio": 0.5,
            "vision_feature_layer": -1,
            **IMAGE,
        },
        1,
    ),
    "Mistral3": (
        {
            "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8},
            "text_config": {"model_type": "mistral", **TEXT},
            "spatial_merge_size": 1,
            "vision_feature_layer": -1,
            **IMAGE_INDEX,
        },
        4,
    ),
    "SmolVLM": (
        {"vision_config": VISION, "text_config": {"model_type": "llama", **TEXT}, "scale_factor": 2, **IMAGE},
        1,
    ),
    "Qwen2VL": (
        {
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, **QWEN_VISION},
            "text_config": {**TEXT, **MROPE},
            **QWEN_TOKENS,
        },
        1,
    ),
    "Qwen2_5_VL": (
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 32,
                "window_size": 32,
                "fullatt_block_indexes": [1],
                **QWEN_VISION,
            },
            "text_config": {**TEXT, **MROPE},
            **QWEN_TOKENS,
        },
        1,
    ),
    "Qwen3VL": ({"vision_config": DEEPSTACK, "text_config": {**TEXT, **MROPE}, **QWEN_TOKENS}, 1),
    "Qwen3VLMoe": ({"vision_config": DEEPSTACK, "text_config": {**TEXT, **EXPERTS, **MROPE}, **QWEN_TOKENS}, 1),
    "Qwen3_5": ({"vision_config": QWEN3_VISION, "text_config": {**TEXT, **DELTA_NET, **MROPE}, **QWEN_TOKENS}, 1),
    "Qwen3_5Moe": (
        {
            "vision_config": QWEN3_VISION,
            "text_config": {**TEXT, **EXPERTS, **SHARED_EXPERT, **DELTA_NET, **MROPE},
            **QWEN_TOKENS,
        },
        1,
    ),
    "Mllama": (
        {
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 4,
                "image_size": 16,
                "patch_size": 8,
                "num_channels": 3,
                "max_num_tiles": 1,
                "vision_output_dim": 64,
                "intermediate_layers_indices": [1],
                "supported_aspect_ratios": [[1, 1]],
            },
            "text_config": {**TEXT, "cross_attention_layers": [1], "num_hidden_layers": 3},
            "image_token_index": IMAGE_TOKEN,
        },
        0,
    ),
    "Llama4": (
        {
            "vision_config": {
                **VISION,
                "intermediate_size": 128,  # four patches of hidden_size become a token
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "text_config": {**TEXT, **LLAMA4},
            "image_token_index": IMAGE_TOKEN,
        },
        1,
    ),
}
"""By family: configuration, and tokens per image."""

MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": LOCAL_EXPERTS,
    "Qwen2Moe": {**EXPERTS, **SHARED_EXPERT},
    "Qwen3Moe": EXPERTS,
    "Qwen3Next": {**EXPERTS, **SHARED_EXPERT, **DELTA_NET},
    "Olmoe": EXPERTS,
    "GraniteMoe": LOCAL_EXPERTS,
    "GraniteMoeHybrid": {
        **LOCAL_EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_d_state": 8,
        "shared_intermediate_size": 16,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_chunk_size": 8,
    },
    "Jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "Phimoe": {**LOCAL_EXPERTS, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "DeepseekV3": {
        **ROUTED,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "Glm4Moe": ROUTED,
    "GptOss": {**LOCAL_EXPERTS, "sliding_window": 8},
    "Llama4Text": LLAMA4,
}
OTHERS: dict[str, dict[str, Any]] = {
    "Gemma3nText": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.5] * 5,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8,
        "sliding_window": 8,
    },
}
"""Decoders of vision-language models whose towers need a package of their own."""
FAMILIES = [*VISION_MODELS, *MIXTURES, *OTHERS]
_COUNTED_TYPES = ("Gemma3", "PaliGemma")


def build(family: str, experts: str = "eager", **changes: Any) -> Callable[[], nn.Module]:
    """``family``: one of FAMILIES, or a dense decoder. ``changes``: fields of the configuration."""
    import transformers

    def make() -> nn.Module:
        own = {**MIXTURES, **OTHERS}
        fields = VISION_MODELS[family][0] if family in VISION_MODELS else {**TEXT, **own.get(family, {})}
        config = getattr(transformers, family + "Config")(**copy.deepcopy({**fields, **changes}))
        config._experts_implementation = experts
        return getattr(transformers, class_name(family))(config)

    return make


def class_name(family: str) -> str:
    """Name of the family's class in transformers."""
    return (
        f"{family}ForConditionalGeneration" if family in VISION_MODELS else family.removesuffix("Text") + "ForCausalLM"
    )


def batch(family: str, seed: int, is_common: bool, has_image: bool) -> dict[str, torch.Tensor]:
    """Two samples: any tokens where ``is_common``, else few different ones, which reach few experts."""
    generator = torch.Generator().manual_seed(seed)
    high = 90 if is_common else 5
    tokens = torch.randint(3, high, (2, LENGTH), generator=generator)
    if family not in VISION_MODELS:
        return {"input_ids": tokens, "labels": tokens.clone()}
    num_tokens = VISION_MODELS[family][1]
    found: dict[str, torch.Tensor] = {}
    if has_image:
        tokens[:, 1 : 1 + num_tokens] = IMAGE_TOKEN
        found |= _image(family, generator)
    if family.startswith("Qwen"):
        tokens[:, 0] = 96 if has_image else 4
        found["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).int()
    if family in _COUNTED_TYPES:
        found["token_type_ids"] = (tokens == IMAGE_TOKEN).long()
    labels = torch.where((tokens == IMAGE_TOKEN) | (tokens == 96), -100, tokens)
    return {"input_ids": tokens, "labels": labels, **found}


def _image(family: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if family.startswith("Qwen"):
        pixels = torch.randn(2 * 4, 3 * 2 * 8 * 8, generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2]] * 2)}
    if family == "SmolVLM":
        return {"pixel_values": torch.randn(2, 1, 3, 16, 16, generator=generator)}
    if family == "Mllama":
        return {
            "pixel_values": torch.randn(2, 1, 1, 3, 16, 16, generator=generator),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
            "cross_attention_mask": torch.ones(2, LENGTH, 1, 1, dtype=torch.long),
        }
    pixels = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    return pixels | ({"image_sizes": torch.tensor([[16, 16]] * 2)} if family == "Mistral3" else {})

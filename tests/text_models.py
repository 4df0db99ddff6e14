"""Small causal and masked language models of all classes in transformers: ``build(name)()`` is a model of width 32 and
two layers.
"""

import inspect
import re
from typing import Any

import torch
from torch import nn

from tests.models import VOCAB

POSITIONS = 64
FIRST_WORD = 10
"""Tokens below this number are special."""
_SPECIAL = ("pad", "bos", "eos", "unk", "sep", "cls", "mask")
_SIZES: list[tuple[str, Any]] = [
    # The first pattern that matches an attribute's whole name gives its value; None keeps the default.
    (r"chunk_size_feed_forward|type_vocab_size|num_labels|audio_.*", None),
    (r"vocab_size|.*_vocab_size|vocab_size_.*|n_vocab", VOCAB),
    (r".*codebook_size", 64),
    (r"max_position_embeddings|n_positions|n_ctx|max_source_positions|max_target_positions|max_seq_len.*|seq_length"
     r"|max_sequence_length|max_position|max_length_position", POSITIONS),
    (r"num_hidden_layers|n_layers?|num_layers|.*(encoder|decoder)_layers|num_(de|en)coder_layers", 2),
    (r".*num_key_value_heads|num_kv_heads|n_head_kv|multi_query_groups|num_query_groups", 2),
    (r".*(num|n)_heads?|num_attention_heads|.*attention_heads|n_head|heads", 4),
    (r"hidden_size|d_model|n_embd|embed_dim|emb_dim|dim|model_dim|width|encoder_hidden_size|.*_hidden_size", 32),
    (r"embedding_size|word_embed_proj_dim|embedding_dim", 32),
    (r".*expert.*_size|moe_intermediate_size|expert_dim", 16),
    (r".*intermediate_size.*|.*ffn_dim|n_inner|d_ff|.*_ffn_size|d_inner|hidden_dim|dim_ff|ffn_hidden_size", 48),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|n_experts", 4),
    (r"num_experts_per_tok|num_experts_per_token|moe_topk|top_k|topk|moe_top_k|num_experts_per_topk|moe_k", 2),
    (r"n_shared_experts|num_shared_experts|n_group|topk_group|num_expert_group|first_k_dense_replace", 1),
    (r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim|.*rope_head_dim|.*nope_head_dim", 8),
    (r"qk_head_dim", 16),
    (r"head_dim|v_head_dim|kv_channels|attention_head_size|.*head_dim|d_kv|dim_head", 8),
    (r".*lora_rank.*|laurel_rank|hidden_size_per_layer_input|.*state_size|.*d_state|.*chunk_size.*", 8),
    (r"sliding_window|attention_window|local_attention|window_size|sliding_window_size", 4),
]  # fmt: skip
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_OTHERWISE: dict[str, dict[str, Any]] = {
    "BailingHybridConfig": _MIXED,
    "BambaConfig": {"attn_layer_indices": [1]},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "EsmConfig": {"vocab_size": VOCAB, "pad_token_id": 1, "mask_token_id": 7},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nTextConfig": {"num_hidden_layers": 5, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 5},
    "GraniteMoeHybridConfig": _MIXED,
    "HunYuanDenseV1Config": {"head_dim": 8},
    "HunYuanMoEV1Config": {"head_dim": 8},
    "KimiLinearConfig": _MIXED,
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"num_heads": 8},
    "MinistralConfig": {"head_dim": 8},
    "NemotronConfig": {"num_key_value_heads": 2, "head_dim": 8},
    "NemotronHConfig": {"n_groups": 2},
    "NeoMMEConfig": {"head_dim": 16},
    "Qwen3NextConfig": _MIXED,
    "Qwen3_5MoeTextConfig": _MIXED,
    "Qwen3_5TextConfig": _MIXED,
    "Qwen4ExpTextConfig": {
        **_MIXED,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "ReformerConfig": {"axial_pos_embds": False},
    "xLSTMConfig": {"chunk_size": 4},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "Zamba2Config": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "ZayaConfig": {"num_experts_per_tok": 1},
}
"""Further values by configuration class that the smaller sizes require."""
_AS_MANY_KEY_HEADS = ("EsmcConfig",)
NOT_BUILT = {
    "BltForCausalLM": "its parts do not go together when they are small",
    "Gemma3nForConditionalGeneration": "its vision tower needs timm",
    "Gemma4AssistantForCausalLM": "it reads the cache of another model",
    "Gemma4UnifiedAssistantForCausalLM": "it reads the cache of another model",
    "ReformerModelWithLMHead": "it needs another configuration than the class that is tried",
}
"""Classes that are not tried, with the reason."""
NOT_TRAINED = ("GitForCausalLM", "MusicgenForCausalLM", "MusicgenMelodyForCausalLM", "PerceiverForMaskedLM")
"""Classes that cannot compute a loss from tokens and labels alone."""


def text_models() -> list[str]:
    from transformers.models.auto import modeling_auto as auto

    found = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()}
    return sorted(found - set(NOT_BUILT))


def tiny_config(kind: type) -> Any:
    sizes = _sizes(kind())
    if "kv_lora_rank" in sizes or kind.__name__ in _AS_MANY_KEY_HEADS:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return kind(**{**sizes, **_OTHERWISE.get(kind.__name__, {})})


def _sizes(config: Any) -> dict[str, Any]:
    found = {}
    taken = {*inspect.signature(type(config).__init__).parameters, *getattr(type(config), "__dataclass_fields__", {})}
    for name, value in vars(config).items():
        if type(value).__name__.endswith("Config"):
            found[name] = tiny_config(type(value))
        elif name not in taken or isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            continue
        elif ("drop" in name or "jitter" in name) and isinstance(value, float):
            found[name] = 0.0
        elif name in {f"{special}_token_id" for special in _SPECIAL}:
            if value is not None:
                found[name] = 1 + _SPECIAL.index(name.split("_")[0])
        elif isinstance(value, int):
            size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
            found |= {} if size is None else {name: size}
    return found


def build(name: str) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(tiny_config(kind.config_class))

"""Well-known models: figures of their public configurations, as arguments of transformers' classes. Standard library
only.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from patrickstar.planning.known_mixtures import MIXTURES, OTHER_MIXTURES
from patrickstar.planning.known_vision_models import OTHER_VISION_MODELS, VISION_MODELS
from patrickstar.planning.model_shapes import TIED, Known, decoder, gemma3


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {"n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": 50257, "n_positions": 1024}


_STARCODER: dict[str, Any] = {"sliding_window": None, "bos_token_id": 0, "eos_token_id": 0}

_TEXT_MODELS: Known = {
    "llama-2-7b": ("LlamaConfig", decoder(4096, 32, 32, 32, 11008, 32000, max_position_embeddings=4096)),
    "llama-2-13b": ("LlamaConfig", decoder(5120, 40, 40, 40, 13824, 32000, max_position_embeddings=4096)),
    "llama-2-70b": ("LlamaConfig", decoder(8192, 80, 64, 8, 28672, 32000, max_position_embeddings=4096)),
    "llama-3.1-8b": ("LlamaConfig", decoder(4096, 32, 32, 8, 14336, 128256)),
    "llama-3.1-70b": ("LlamaConfig", decoder(8192, 80, 64, 8, 28672, 128256)),
    "llama-3.1-405b": ("LlamaConfig", decoder(16384, 126, 128, 8, 53248, 128256)),
    "llama-3.2-1b": ("LlamaConfig", decoder(2048, 16, 32, 8, 8192, 128256, head_dim=64, **TIED)),
    "llama-3.2-3b": ("LlamaConfig", decoder(3072, 28, 24, 8, 8192, 128256, head_dim=128, **TIED)),
    "codellama-34b": ("LlamaConfig", decoder(8192, 48, 64, 8, 22016, 32000, max_position_embeddings=16384)),
    "tinyllama-1.1b": ("LlamaConfig", decoder(2048, 22, 32, 4, 5632, 32000, max_position_embeddings=2048)),
    "smollm2-135m": ("LlamaConfig", decoder(576, 30, 9, 3, 1536, 49152, **TIED)),
    "smollm2-360m": ("LlamaConfig", decoder(960, 32, 15, 5, 2560, 49152, **TIED)),
    "smollm2-1.7b": ("LlamaConfig", decoder(2048, 24, 32, 32, 8192, 49152, **TIED)),
    "deepseek-coder-6.7b": ("LlamaConfig", decoder(4096, 32, 32, 32, 11008, 32256)),
    "deepseek-coder-33b": ("LlamaConfig", decoder(7168, 62, 56, 8, 19200, 32256)),
    "yi-1.5-6b": ("LlamaConfig", decoder(4096, 32, 32, 4, 11008, 64000)),
    "yi-1.5-9b": ("LlamaConfig", decoder(4096, 48, 32, 4, 11008, 64000)),
    "yi-1.5-34b": ("LlamaConfig", decoder(7168, 60, 56, 8, 20480, 64000)),
    "mistral-7b": ("MistralConfig", decoder(4096, 32, 32, 8, 14336, 32768, sliding_window=None)),
    "ministral-8b": ("MistralConfig", decoder(4096, 36, 32, 8, 12288, 131072, head_dim=128, sliding_window=None)),
    "mistral-nemo-12b": ("MistralConfig", decoder(5120, 40, 32, 8, 14336, 131072, head_dim=128, sliding_window=None)),
    "mistral-small-24b": (
        "MistralConfig", decoder(5120, 40, 32, 8, 32768, 131072, head_dim=128, sliding_window=None),
    ),
    "mistral-large-123b": ("MistralConfig", decoder(12288, 88, 96, 8, 28672, 32768, sliding_window=None)),
    "qwen2.5-0.5b": ("Qwen2Config", decoder(896, 24, 14, 2, 4864, 151936, **TIED)),
    "qwen2.5-1.5b": ("Qwen2Config", decoder(1536, 28, 12, 2, 8960, 151936, **TIED)),
    "qwen2.5-3b": ("Qwen2Config", decoder(2048, 36, 16, 2, 11008, 151936, **TIED)),
    "qwen2.5-7b": ("Qwen2Config", decoder(3584, 28, 28, 4, 18944, 152064)),
    "qwen2.5-14b": ("Qwen2Config", decoder(5120, 48, 40, 8, 13824, 152064)),
    "qwen2.5-32b": ("Qwen2Config", decoder(5120, 64, 40, 8, 27648, 152064)),
    "qwen2.5-72b": ("Qwen2Config", decoder(8192, 80, 64, 8, 29568, 152064)),
    "qwen3-0.6b": ("Qwen3Config", decoder(1024, 28, 16, 8, 3072, 151936, head_dim=128, **TIED)),
    "qwen3-1.7b": ("Qwen3Config", decoder(2048, 28, 16, 8, 6144, 151936, head_dim=128, **TIED)),
    "qwen3-4b": ("Qwen3Config", decoder(2560, 36, 32, 8, 9728, 151936, head_dim=128, **TIED)),
    "qwen3-8b": ("Qwen3Config", decoder(4096, 36, 32, 8, 12288, 151936, head_dim=128)),
    "qwen3-14b": ("Qwen3Config", decoder(5120, 40, 40, 8, 17408, 151936, head_dim=128)),
    "qwen3-32b": ("Qwen3Config", decoder(5120, 64, 64, 8, 25600, 151936, head_dim=128)),
    "gemma-2b": ("GemmaConfig", decoder(2048, 18, 8, 1, 16384, 256000, head_dim=256, **TIED)),
    "gemma-7b": ("GemmaConfig", decoder(3072, 28, 16, 16, 24576, 256000, head_dim=256, **TIED)),
    "gemma-2-2b": ("Gemma2Config", decoder(2304, 26, 8, 4, 9216, 256000, head_dim=256, **TIED)),
    "gemma-2-9b": ("Gemma2Config", decoder(3584, 42, 16, 8, 14336, 256000, head_dim=256, **TIED)),
    "gemma-2-27b": ("Gemma2Config", decoder(4608, 46, 32, 16, 36864, 256000, head_dim=128, **TIED)),
    "gemma-3-270m": ("Gemma3TextConfig", gemma3(640, 18, 4, 1, 2048, vocab=262144)),
    "gemma-3-1b": ("Gemma3TextConfig", gemma3(1152, 26, 4, 1, 6912, vocab=262144)),
    "phi-3.5-mini": ("Phi3Config", decoder(3072, 32, 32, 32, 8192, 32064)),
    "phi-3-medium": ("Phi3Config", decoder(5120, 40, 40, 10, 17920, 32064)),
    "phi-4": ("Phi3Config", decoder(5120, 40, 40, 10, 17920, 100352, max_position_embeddings=16384)),
    "phi-4-mini": ("Phi3Config", decoder(3072, 32, 24, 8, 8192, 200064, **TIED)),
    "glm-4-9b": ("Glm4Config", decoder(4096, 40, 32, 2, 13696, 151552, head_dim=128)),
    "glm-4-32b": ("Glm4Config", decoder(6144, 61, 48, 2, 23040, 151552, head_dim=128)),
    "olmo-2-7b": ("Olmo2Config", decoder(4096, 32, 32, 32, 11008, 100352, max_position_embeddings=4096)),
    "olmo-2-13b": ("Olmo2Config", decoder(5120, 40, 40, 40, 13824, 100352, max_position_embeddings=4096)),
    "olmo-2-32b": ("Olmo2Config", decoder(5120, 64, 40, 8, 27648, 100352, max_position_embeddings=4096)),
    "starcoder2-7b": ("Starcoder2Config", decoder(4608, 32, 36, 4, 18432, 49152, **_STARCODER, **TIED)),
    "starcoder2-15b": ("Starcoder2Config", decoder(6144, 40, 48, 4, 24576, 49152, **_STARCODER)),
    "gpt2": ("GPT2Config", _gpt2(768, 12, 12)),
    "gpt2-medium": ("GPT2Config", _gpt2(1024, 24, 16)),
    "gpt2-large": ("GPT2Config", _gpt2(1280, 36, 20)),
    "gpt2-xl": ("GPT2Config", _gpt2(1600, 48, 25)),
}  # fmt: skip

KNOWN_MODELS: Known = _TEXT_MODELS | MIXTURES | VISION_MODELS

_OTHER_NAMES = {
    "llama-8b": "llama-3.1-8b",
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.1-70b",
    "llama-3.3-70b": "llama-3.1-70b",
    "llama-70b": "llama-3.1-70b",
    "qwen-14b": "qwen2.5-14b",
    "qwq-32b": "qwen2.5-32b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.1-70b",
    "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "deepseek-r1-0528-qwen3-8b": "qwen3-8b",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-small": "mistral-small-24b",
    "mistral-small-3": "mistral-small-24b",
    "devstral-small": "mistral-small-24b",
    "mistral-large": "mistral-large-123b",
    "phi-3-mini": "phi-3.5-mini",
    "olmo-2-1124-7b": "olmo-2-7b",
    "olmo-2-1124-13b": "olmo-2-13b",
    "olmo-2-0325-32b": "olmo-2-32b",
    **OTHER_MIXTURES,
    **OTHER_VISION_MODELS,
}
_VARIANT = re.compile(
    r"(?<!deepseek)-(instruct|chat|base|it|pt|hf|fp8|bf16|thinking|reasoning|coder|math|large-context|4k|128k"
    r"|\d{4}|v\d+(\.\d+)*)(?=-|$)"
)


def known_name(text: str) -> str | None:
    """Returns the key of :data:`KNOWN_MODELS` for a usual name or the hub id of a model or of its variant, such as
    ``Qwen/Qwen3-8B`` and ``meta-llama/Llama-3.1-8B-Instruct``; None: there is none.
    """
    word = text.lower().rpartition("/")[2].removeprefix("meta-")
    for name in (word, _VARIANT.sub("", word)):
        name = _OTHER_NAMES.get(name, name)
        if name in KNOWN_MODELS:
            return name
    return None


# Hidden size x layers of the benchmarks' GPTs; untied output layer.
_SIZES = {
    "0.1b": (768, 12),
    "1.6b": (1600, 48),
    "4.3b": (2304, 64),
    "6.3b": (3072, 53),
    "10.5b": (4096, 50),
    "16.1b": (4096, 78),
    "18.5b": (4096, 90),
    "21b": (8192, 25),
    "68b": (9216, 66),
}
_HEADS = {768: 12, 1600: 25, 8192: 64, 9216: 72}  # others: 16


def gpt_shape(name: str) -> tuple[int, int, int] | None:
    """Hidden size, layers and heads of a GPT that is named by its shape or size; None: it is not."""
    match = re.fullmatch(r"gpt:([1-9]\d*)x([1-9]\d*)", name)
    shape = _SIZES.get(name.lower()) if match is None else (int(match.group(1)), int(match.group(2)))
    return None if shape is None else (*shape, _HEADS.get(shape[0], 16))


def model_mistake(name: str) -> str | None:
    """Returns the reason why no model has this name; None: there is one. A path's file is not read."""
    shape = gpt_shape(name)
    if shape is not None:
        hidden, _, heads = shape
        if hidden % heads:
            return f"--model {name}: the hidden size {hidden} is not a multiple of {heads}, the number of heads"
        return None
    if Path(name).exists() or known_name(name) is not None:
        return None
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], KNOWN_MODELS, n=3)
    return (
        f"--model is {name!r}; give a name ({', '.join(near or ('llama-3.1-8b', 'qwen3-8b', 'mistral-7b'))}; --help "
        "lists all), gpt:HIDDENxLAYERS (gpt:2304x64), or the path of a Hugging Face config.json or of its folder"
    )

"""The causal language models that are tuned: from a folder, whole or with LoRA; what they can do and what they say."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from patrickstar.command.flags import UsageError
from patrickstar.finetune.conversations import Conversation
from patrickstar.finetune.encoding import ChatEncoder
from patrickstar.finetune.ranks import Ranks
from patrickstar.module.pretrained import from_pretrained

_COMPARED_BYTES = 2**20
"""Bytes of each file of weights, from its end, by which models are told apart."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: str) -> torch.dtype:
    """Returns the dtype that ``--precision`` names."""
    return _DTYPES[precision]


def load_config(folder: Path) -> Any:
    """The model's configuration.

    Raises:
        UsageError: it is none, or not that of a causal language model.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--model {folder}: config.json cannot be used: {error}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UsageError(f"--model {folder} is of type {config.model_type}, which is no causal language model")
    return config


def load_tokenizer(folder: Path) -> Any:
    """The model's tokenizer.

    Raises:
        UsageError: it cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever a broken file makes of it: tokenizers raises Exception itself
        raise UsageError(f"--model {folder}: its tokenizer cannot be loaded: {error}") from error


def folder_identity(folder: Path, config: Any) -> str:
    """The model's type, and a hash of its configuration and of a part of its weights; equal wherever the folder is."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _COMPARED_BYTES))
            digest.update(size.to_bytes(8, "little") + file.read())
    return f"{config.model_type} ({digest.hexdigest()[:12]})"


def max_positions(config: Any) -> int | None:
    """The longest row that the model takes; None: any."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def load_model(folder: Path) -> nn.Module:
    """The folder's model, without memory yet: an engine reads its weights straight into chunks."""
    model = from_pretrained(folder, AutoModelForCausalLM, dtype=torch.float32)
    model.loss_type = "ForCausalLM"  # what transformers would use as well, for some with a warning
    return model


def load_frozen_model(folder: Path, precision: str, quantization: str | None) -> nn.Module:
    """The folder's model as LoRA needs it: 2 bytes per parameter in 16-bit training, or what ``quantization`` takes."""
    dtype = _DTYPES[precision]
    if quantization is None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    else:
        model = from_pretrained(folder, AutoModelForCausalLM, dtype=dtype, quantization=quantization)
    model.loss_type = "ForCausalLM"
    return model


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    """``model``, frozen, with LoRA on all linear layers but the output."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def check_packing(model: nn.Module, vocab_size: int, precision: str) -> None:
    """Tries whether the model keeps the conversations of a packed row apart.

    Raises:
        UsageError: what a conversation gives depends on the one before it in the row, or on where it begins.
    """
    first, other, second = torch.randint(0, vocab_size, (3, 1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12)[None]
    model.eval()
    with torch.no_grad():
        try:
            packed, beside_other, alone = (
                model(
                    input_ids=torch.cat([*before, second], 1),
                    position_ids=torch.cat([positions] * (len(before) + 1), 1),
                    use_cache=False,
                )
                .logits[:, -12:]
                .float()
                for before in ([first], [other], [])
            )
        except TypeError as error:
            raise UsageError(f"--packing: the model takes no position_ids ({error}); leave --packing out") from error
    scale = float(alone.abs().max())
    exact, near = (1e-5, 1e-3) if precision == "fp32" else (1e-3, 5e-2)
    if float((packed - beside_other).abs().max()) > exact * scale or float((packed - alone).abs().max()) > near * scale:
        raise UsageError(
            f"--packing: {type(model.module).__name__} does not keep the conversations of a row apart by position_ids; "
            "leave --packing out"
        )


def print_answers(
    model: nn.Module, encoder: ChatEncoder, asked: Sequence[Conversation], num_tokens: int, ranks: Ranks
) -> None:
    """Prints the model's answers to the last questions of ``asked``, the likeliest token each time, and counts those
    that are equal to the answers of ``asked``.
    """
    tokenizer = encoder.tokenizer
    model.eval()
    num_equal = 0
    for conversation in asked:
        prompt = torch.tensor([encoder.prompt(conversation)], device=model.device)
        tokens = model.generate(  # on all ranks: each has a part of the model
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
            eos_token_id=encoder.end_ids(conversation),
            synced_gpus=ranks.size > 1,
        )
        said = tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)
        ranks.say(f"  > {_one_line(conversation.messages[-2].content)}\n    {_one_line(said)}")
        num_equal += said.split() == conversation.messages[-1].content.split()
    ranks.say(f"  {num_equal} of {len(asked)} answers are the held-out ones, word for word")


def _one_line(text: str, longest: int = 110) -> str:
    text = " ".join(text.split()) or "(nothing)"
    return text if len(text) <= longest else f"{text[:longest]}…"

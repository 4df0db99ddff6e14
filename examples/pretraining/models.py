"""GPT and BERT of any size, built without memory."""

from __future__ import annotations

import dataclasses
import enum

import torch
from torch import nn

from patrickstar.planning.models import enable_checkpointing


class ModelKind(enum.Enum):
    """Architecture and pre-training task."""

    GPT = "gpt"
    """Hugging Face's GPT-2 with an output layer of its own: the next token."""
    BERT = "bert"
    """Hugging Face's BERT: masked tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Everything that makes a model."""

    kind: ModelKind = ModelKind.GPT
    """Which of both."""
    hidden: int
    """Hidden size."""
    layers: int
    """Transformer blocks."""
    heads: int
    """Attention heads, a divisor of ``hidden``."""
    vocab: int
    """Token ids; BERT's last one is its mask."""
    length: int
    """Tokens per sequence."""
    dropout: float = 0.0
    """In every place where the model has one."""
    checkpointing: bool = False
    """True if activations are recomputed in backward, block by block."""

    def __post_init__(self):
        for name in ("hidden", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; give 1 or more")
        if self.hidden % self.heads:
            raise ValueError(f"--hidden is {self.hidden}, no multiple of --heads {self.heads}; change one of them")
        if self.vocab < 3:
            raise ValueError(f"--vocab is {self.vocab}; give 3 tokens or more")
        if self.length < 2:
            raise ValueError(f"--length is {self.length}; give 2 tokens or more")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout is {self.dropout}; give 0 or more and less than 1")

    @property
    def num_data_tokens(self) -> int:
        """Ids that data may have: 0 up to this, exclusive."""
        return self.vocab - 1 if self.kind is ModelKind.BERT else self.vocab

    def model_flops(self, num_parameters: int, num_sequences: int) -> float:
        """Floating point operations of forward and backward: 6 per parameter and token, and 12 per layer, hidden unit,
        position and token for attention, of which a causal mask leaves half. Recomputation is not counted.
        """
        tokens = num_sequences * self.length
        attention = 12.0 if self.kind is ModelKind.BERT else 6.0
        return (6.0 * num_parameters + attention * self.layers * self.hidden * self.length) * tokens


SIZES = {  # hidden, layers, heads, vocab, length; those of the benchmark
    "tiny": (128, 4, 4, 1024, 64),
    "0.1b": (768, 12, 12, 50304, 1024),
    "1.5b": (1600, 48, 25, 50304, 1024),
    "4.3b": (2304, 64, 16, 50304, 1024),
    "6.3b": (3072, 53, 16, 50304, 1024),
    "10.5b": (4096, 50, 16, 50304, 1024),
    "16.1b": (4096, 78, 16, 50304, 1024),
    "18.5b": (4096, 90, 16, 50304, 1024),
    "21b": (8192, 25, 64, 50304, 1024),
    "68b": (9216, 66, 72, 50304, 1024),
}


def build_model(shape: ModelShape) -> nn.Module:
    """The model on the meta device: an engine initialises it there where it trains, piece by piece."""
    with torch.device("meta"):
        model = _gpt(shape) if shape.kind is ModelKind.GPT else _bert(shape)
    if shape.checkpointing:
        enable_checkpointing(model)
    return model


def _gpt(shape: ModelShape) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.length,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=shape.dropout,
        embd_pdrop=shape.dropout,
        attn_pdrop=shape.dropout,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what transformers would use as well, with a warning
    return model


def _bert(shape: ModelShape) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=shape.vocab,
        max_position_embeddings=shape.length,
        hidden_size=shape.hidden,
        intermediate_size=4 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
        pad_token_id=None,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = BertForMaskedLM(config)
    model.loss_type = "ForMaskedLM"
    return model

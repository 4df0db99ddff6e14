"""Small deterministic models, one for every kind of use of parameters. ``MODELS[name]`` is a :class:`Case`: a function
that builds the model and one that makes a batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCAB = 97
BATCH, LENGTH = 2, 16


def loss_of(out: Any) -> torch.Tensor:
    return out["loss"]


@dataclasses.dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, Any]]
    loss: Callable[[Any], torch.Tensor] = loss_of


def token_batch(generator: torch.Generator) -> dict[str, Any]:
    tokens = torch.randint(1, VOCAB, (BATCH, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def gpt2(hidden=32, layers=2, dropout=0.0, heads=4, length=LENGTH):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCAB, "n_positions": length, "n_embd": hidden, "n_layer": layers, "n_head": heads}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=LENGTH,
        )
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def llama_config(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=None, vocab=VOCAB, length=LENGTH, **more):
    from transformers import LlamaConfig

    more = {"bos_token_id": 0, "eos_token_id": 0, "architectures": ["LlamaForCausalLM"], **more}
    return LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate or 2 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=length, **more,
    )  # fmt: skip


def llama(**sizes):
    from transformers import LlamaForCausalLM

    attention = sizes.pop("attention", None)
    config = llama_config(**sizes)
    if attention is not None:
        config._attn_implementation = attention
    return LlamaForCausalLM(config)


def albert():
    from transformers import AlbertConfig, AlbertForMaskedLM

    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=VOCAB,
            embedding_size=16,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=LENGTH,
        )
    )


def lora():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    return get_peft_model(gpt2(), config)


class Mlp(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCAB)

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return {"loss": lm_loss(self.head(hidden), labels)}


class Unused(Mlp):
    """Parameters that are never used, and one used in every other step."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(7, 7)
        self.sometimes = nn.Linear(32, 32)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids)
        if self.calls.item() % 2 == 1:
            hidden = self.sometimes(hidden)
        if torch.is_grad_enabled():
            self.calls += 1
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return {"loss": lm_loss(self.head(hidden), labels)}


class Shared(nn.Module):
    """One layer called several times, and a weight under two names."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.layer = nn.Linear(32, 32)
        self.head = nn.Linear(32, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids)
        for _ in range(3):
            hidden = torch.tanh(self.layer(hidden))
        return {"loss": lm_loss(self.head(hidden), labels)}


@dataclasses.dataclass
class Output:
    nested: dict[str, Any]


class KeywordsOnly(nn.Module):
    """Every module takes keyword-only tensors in nested containers and returns a dataclass that pytree does not
    know.
    """

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, *, inputs):
            return Output({"hidden": [self.linear(inputs["x"][0])], "name": "inner"})

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.inner = nn.ModuleList(self.Inner() for _ in range(3))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, *, tokens):
        hidden = self.embed(tokens["input_ids"])
        for inner in self.inner:
            hidden = inner(inputs={"x": (hidden,)}).nested["hidden"][0]
        return Output({"loss": lm_loss(self.head(hidden), tokens["labels"])})


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.lstm = nn.LSTM(24, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids, labels):
        return {"loss": lm_loss(self.head(self.lstm(self.embed(input_ids))[0]), labels)}


class ConvNet(nn.Module):
    """Convolutions in channels-last memory, BatchNorm with its buffers, in-place activations."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            # No biases: before a BatchNorm their gradient is zero but for rounding, which Adam would blow up to its
            # learning rate.
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(32, 10)
        self.to(memory_format=torch.channels_last)

    def forward(self, images, labels):
        return {"loss": F.cross_entropy(self.head(self.body(images)).float(), labels)}


def image_batch(generator: torch.Generator) -> dict[str, Any]:
    return {
        "images": torch.randn(4, 3, 8, 8, generator=generator),
        "labels": torch.randint(0, 10, (4,), generator=generator),
    }


class FunctionalTying(nn.Module):
    """The output layer reads the embedding's weight outside of its owner's forward, directly and through a view."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.body = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, input_ids, labels):
        weight = self.embed.weight.t()
        hidden = self.body(self.embed(input_ids)) * self.scale
        return {"loss": lm_loss(F.linear(hidden, self.embed.weight) + hidden @ weight, labels)}


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 2 * LENGTH, 32) * 0.1)

    def forward(self, length):
        return self.table[:, :length]


class EscapingView(nn.Module):
    """Views of parameters outlive their module's forward and are needed in backward. A linear layer's output, a view of
    a product, is changed in place.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.positions = Positions()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids, labels):
        positions = self.positions(input_ids.shape[1])
        hidden = self.body(self.embed(input_ids))
        hidden += positions
        return {"loss": lm_loss(self.head(hidden * positions), labels)}


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        # With a trivialization it would multiply a buffer, which keeps its float32, with the 16-bit parameter.
        self.second = nn.utils.parametrizations.orthogonal(nn.Linear(32, 32), use_trivialization=False)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids, labels):
        return {"loss": lm_loss(self.head(self.second(torch.relu(self.first(self.embed(input_ids))))), labels)}


class MixtureOfExperts(nn.Module):
    """The path through the experts differs from step to step; the router's auxiliary loss is read from an attribute."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(32, 4)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
            )

        def forward(self, hidden):
            probabilities = self.router(hidden).float().softmax(-1)
            self.auxiliary = probabilities.mean(dim=(0, 1)).square().sum()
            chosen = int(probabilities.sum(dim=(0, 1)).argmax())
            return hidden + self.experts[chosen](hidden) * probabilities[..., chosen, None].to(hidden.dtype)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        loss = lm_loss(self.head(hidden), labels)
        return {"loss": loss + 0.1 * sum(layer.auxiliary for layer in self.layers)}


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


class CustomFunction(nn.Module):
    """An autograd.Function saves a parameter and another saves a view of a parameter."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32) * 0.2)

        def forward(self, x):
            return torch.tanh(_FusedLinear.apply(_FusedLinear.apply(x, self.weight), self.weight.t()))

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.layers = nn.Sequential(self.Layer(), self.Layer(), self.Layer())
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids, labels):
        return {"loss": lm_loss(self.head(self.layers(self.embed(input_ids))), labels)}


class Attention(nn.Module):
    """nn.MultiheadAttention reads its out_proj's weight without calling it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids, labels):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"loss": lm_loss(self.head(hidden), labels)}


class Frozen(Mlp):
    """Frozen parameters among trainable ones; the first tensor is frozen."""

    def __init__(self):
        super().__init__()
        for param in [self.embed.weight, *self.layers[1].parameters()]:
            param.requires_grad_(False)


MODELS: dict[str, Case] = {
    "gpt2": Case(gpt2, token_batch),
    "bert": Case(bert, token_batch),
    "t5": Case(t5, token_batch),
    "llama": Case(llama, token_batch),
    "albert": Case(albert, token_batch),
    "lora": Case(lora, token_batch),
    "mlp": Case(Mlp, token_batch),
    "unused": Case(Unused, token_batch),
    "shared": Case(Shared, token_batch),
    "keywords_only": Case(KeywordsOnly, lambda g: {"tokens": token_batch(g)}, lambda out: out.nested["loss"]),
    "lstm": Case(Lstm, token_batch),
    "conv_net": Case(ConvNet, image_batch),
    "functional_tying": Case(FunctionalTying, token_batch),
    "escaping_view": Case(EscapingView, token_batch),
    "parametrized": Case(Parametrized, token_batch),
    "mixture_of_experts": Case(MixtureOfExperts, token_batch),
    "custom_function": Case(CustomFunction, token_batch),
    "attention": Case(Attention, token_batch),
    "frozen": Case(Frozen, token_batch),
}

VARIED = ["gpt2", "t5", "lora", "unused", "shared", "parametrized", "mixture_of_experts", "frozen"]
"""One model for each way to use parameters, for tests that need not run all models."""

import copy
import functools
import types

import torch
import transformers
from torch import nn

from patrickstar.tensor2d import (
    MLP2D,
    Attention2D,
    CrossEntropy2D,
    Embedding2D,
    GatedMLP2D,
    LayerNorm2D,
    LMHead2D,
    RMSNorm2D,
    SmallEmbedding2D,
)
from patrickstar.tensor2d.one_dimension import MLP1D, Attention1D, GatedMLP1D, LMHead1D

VOCABULARY = 50  # is no multiple of 3
LENGTH = 5
BATCH = 6
GPT2 = transformers.GPT2Config(
    vocab_size=VOCABULARY, n_positions=8, n_embd=24, n_layer=2, n_head=6, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
LLAMA = transformers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=24,
    intermediate_size=36,
    num_hidden_layers=2,
    num_attention_heads=12,
    num_key_value_heads=6,
    head_dim=4,
)


TWO = types.SimpleNamespace(Attention=Attention2D, MLP=MLP2D, GatedMLP=GatedMLP2D, Head=LMHead2D)
ONE = types.SimpleNamespace(Attention=Attention1D, MLP=MLP1D, GatedMLP=GatedMLP1D, Head=LMHead1D)


class Block(nn.Module):
    def __init__(self, norms, attention, mlp):
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, hidden, rotary=None):
        hidden = hidden + self.attention(self.norm1(hidden), rotary=rotary)
        return hidden + self.mlp(self.norm2(hidden))


class GPT2Like(nn.Module):
    def __init__(self, config, group, layers=TWO):
        super().__init__()
        h = config.n_embd
        self.tokens = Embedding2D(config.vocab_size, h, group)
        self.positions = SmallEmbedding2D(config.n_positions, h, group)
        gelu = functools.partial(nn.functional.gelu, approximate="tanh")
        self.blocks = nn.ModuleList(
            Block(
                (LayerNorm2D(h, group), LayerNorm2D(h, group)),
                layers.Attention(h, config.n_head, group),
                layers.MLP(h, 4 * h, group, activation=gelu),
            )
            for _ in range(config.n_layer)
        )
        self.norm = LayerNorm2D(h, group)
        self.head = layers.Head(h, config.vocab_size, group, tied=self.tokens)

    def forward(self, ids, first=0, length=LENGTH):
        hidden = self.tokens(ids) + self.positions(first + torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class LlamaLike(nn.Module):
    def __init__(self, config, group, layers=TWO):
        super().__init__()
        h = config.hidden_size
        self.tokens = Embedding2D(config.vocab_size, h, group)
        self.blocks = nn.ModuleList(
            Block(
                (RMSNorm2D(h, group), RMSNorm2D(h, group)),
                layers.Attention(
                    h,
                    config.num_attention_heads,
                    group,
                    key_heads=config.num_key_value_heads,
                    head_dim=config.head_dim,
                    bias=False,
                ),
                layers.GatedMLP(h, config.intermediate_size, group),
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm2D(h, group)
        self.head = layers.Head(h, config.vocab_size, group)
        self.rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)

    def forward(self, ids, first=0, length=LENGTH):
        hidden = self.tokens(ids)
        rotary = self.rotary(hidden, torch.arange(length, device=ids.device)[None])
        for block in self.blocks:
            hidden = block(hidden, rotary)
        return self.head(self.norm(hidden))


MODELS = {"gpt2": (GPT2Like, GPT2), "llama": (LlamaLike, LLAMA)}


def reference(name, dtype, attention="sdpa"):
    """Hugging Face's model whose norms do not round to float32."""
    torch.manual_seed(0)
    config = copy.deepcopy(MODELS[name][1])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)  # biases and norms that would be missed
    return exact_norms(model)


def exact_norms(model):
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_rms_norm, module)
    return model


def _rms_norm(module, hidden):
    return nn.functional.rms_norm(hidden, module.weight.shape, module.weight, module.variance_epsilon)


def by_our_names(name, model, of=lambda parameter: parameter):
    """{name here: whole tensor, as PyTorch's layers have it} of Hugging Face's parameters."""
    theirs = {key: of(parameter).detach() for key, parameter in model.named_parameters()}
    return gpt2_names(theirs) if name == "gpt2" else llama_names(theirs)


def gpt2_names(theirs):
    found = {"tokens.weight": theirs["transformer.wte.weight"], "positions.weight": theirs["transformer.wpe.weight"]}
    modules = {"ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "attention.attend.qkv", "attn.c_proj": "attention.out"}
    modules |= {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
    for index in range(GPT2.n_layer):
        for old, new in modules.items():
            for part in ("weight", "bias"):
                value = theirs[f"transformer.h.{index}.{old}.{part}"]
                found[f"blocks.{index}.{new}.{part}"] = value.t() if value.dim() == 2 else value
    for part in ("weight", "bias"):
        found[f"norm.{part}"] = theirs[f"transformer.ln_f.{part}"]
    return found


def llama_names(theirs):
    found = {"tokens.weight": theirs["model.embed_tokens.weight"], "head.weight": theirs["lm_head.weight"]}
    found["norm.weight"] = theirs["model.norm.weight"]
    for index in range(LLAMA.num_hidden_layers):
        old, new = f"model.layers.{index}", f"blocks.{index}"
        found[f"{new}.norm1.weight"] = theirs[f"{old}.input_layernorm.weight"]
        found[f"{new}.norm2.weight"] = theirs[f"{old}.post_attention_layernorm.weight"]
        qkv = [theirs[f"{old}.self_attn.{part}_proj.weight"] for part in "qkv"]
        found[f"{new}.attention.attend.qkv.weight"] = torch.cat(qkv)
        found[f"{new}.attention.out.weight"] = theirs[f"{old}.self_attn.o_proj.weight"]
        gate_up = [theirs[f"{old}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        found[f"{new}.mlp.gate_up.weight"] = torch.cat(gate_up)
        found[f"{new}.mlp.down.weight"] = theirs[f"{old}.mlp.down_proj.weight"]
    return found


def batch(length=LENGTH):
    ids = torch.randint(VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(3))
    ids[0, 0], ids[0, 1] = VOCABULARY - 1, 0
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    labels[1, :3] = -100
    return ids, labels


def plain_loss(model, ids, labels):
    logits = model(ids).logits
    return logits, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_loss(group):
    return CrossEntropy2D(VOCABULARY, group)

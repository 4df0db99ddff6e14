"""Models of plans: a GPT by shape or size, a known model by name, or any Hugging Face configuration."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar.planning.image_inputs import image_batch, image_params, text_stack
from patrickstar.planning.images import Images
from patrickstar.planning.known_models import KNOWN_MODELS, gpt_shape, known_name, model_mistake
from patrickstar.planning.planned_experts import PlannedExperts, SharedExperts
from patrickstar.planning.repeated_layers import Stack
from patrickstar.planning.sharded import PlannedDivision
from patrickstar.planning.sharded_matrices import PlannedMatrices, SharedMatrices
from patrickstar.sequence.choice import Links

_VOCAB = 50304


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A module on the meta device with inputs and figures."""

    module: nn.Module
    """Its parameters have no memory."""
    inputs: dict[str, Any]
    """Keyword arguments of its forward: on the meta device, or on the CPU if shapes follow from their values."""
    num_layers: int
    """Transformer blocks, for :meth:`model_flops`."""
    hidden: int
    """Hidden size, for :meth:`model_flops`."""

    num_params: int
    """Elements of all parameters, over all ranks that share matrices."""
    num_trained: int
    """Elements of trained parameters."""
    num_active: int
    """Elements that compute for each token: all but experts to which it is not sent."""
    num_active_trained: int
    """Elements of these that are trained."""
    num_positions: int | None
    """Positions in the configuration; None: not given. Longer sequences have positions without training."""
    most_tokens: int | None
    """Longest sequence if positions are rows of a table; None: no limit."""
    num_image_tokens: int = 0
    """Tokens of each sequence that stand for its images."""
    stack: Stack | None = None
    """Part whose layers may repeat; None: the whole module."""
    image_params: frozenset[nn.Parameter] = frozenset()
    """Parameters that no token of text reaches, such as a vision tower's; empty if there are no images."""
    image_flops: float = 0.0
    """FLOPs of these parameters' forward and backward, without recomputation."""
    division: PlannedDivision | None = None
    """Sequence parallelism; None: each rank has its own sequences."""
    matrices: PlannedMatrices | None = None
    """Tensor parallelism; None: each rank has whole matrices."""
    experts: PlannedExperts | None = None
    """Expert parallelism; None: ranks share experts."""

    @property
    def divisions(self) -> list[PlannedDivision | PlannedMatrices | PlannedExperts]:
        """Sequence, tensor and expert parallelism, as far as present."""
        return [division for division in (self.division, self.matrices, self.experts) if division is not None]

    def without(self, unused: Iterable[nn.Parameter]) -> PlannedModel:
        """Returns the model in which parameters that no token reaches are not active."""
        num = {True: 0, False: 0}
        for param in unused:
            num[param.requires_grad] += param.numel()
        return dataclasses.replace(
            self,
            num_active=self.num_active - sum(num.values()),
            num_active_trained=self.num_active_trained - num[True],
        )

    def with_image_work(self, forward_flops: float) -> PlannedModel:
        """Returns the model in which :attr:`image_params` compute for images in place of tokens."""
        num_trained = sum(param.numel() for param in self.image_params if param.requires_grad)
        share = num_trained / max(sum(param.numel() for param in self.image_params), 1)
        image_flops = forward_flops * (2.0 + share if num_trained else 1.0)
        return dataclasses.replace(self.without(self.image_params), image_flops=image_flops)

    def model_flops(self, batch: int, length: int) -> float:
        """FLOPs of forward and backward: 6 per active parameter and token (4 if frozen), plus 6 per layer, hidden unit,
        position and token for attention (causal masks count half); and those of images. Recomputation is not counted.
        """
        tokens = batch * length
        of_params = (4.0 * self.num_active + 2.0 * self.num_active_trained) * tokens
        return of_params + 6.0 * self.num_layers * self.hidden * length * tokens + self.image_flops


class _Adapted(nn.ModuleDict):
    """A frozen linear layer with a LoRA adapter of two low-rank matrices."""

    def __init__(self, base: nn.Module, num_inputs: int, num_outputs: int, rank: int):
        down, up = nn.Linear(num_inputs, rank, bias=False), nn.Linear(rank, num_outputs, bias=False)
        super().__init__({"base": base, "lora_a": down, "lora_b": up})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output plus the adapter's."""
        return self["base"](values) + self["lora_b"](self["lora_a"](values))


def _adapt(module: nn.Module, rank: int) -> None:
    """Freezes all parameters; adapts each linear layer except the output layer (PEFT's ``all-linear``)."""
    from transformers.pytorch_utils import Conv1D

    module.requires_grad_(False)
    output = module.get_output_embeddings()
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if child is output or not isinstance(child, (nn.Linear, Conv1D)):
                continue
            rows, columns = child.weight.shape
            inputs, outputs = (rows, columns) if isinstance(child, Conv1D) else (columns, rows)
            setattr(parent, name, _Adapted(child, inputs, outputs, rank))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedSequences:
    """Sequence parallelism over ``size`` ranks."""

    size: int
    links: Links = dataclasses.field(default_factory=Links)
    """Speed of attention and of communication."""


def build_model(
    name: str,
    batch: int,
    length: int,
    *,
    checkpointing: bool,
    lora_rank: int = 0,
    prepare: Callable[[nn.Module], Any] | None = None,
    shared: SharedSequences | None = None,
    matrices: SharedMatrices | None = None,
    experts: SharedExperts | None = None,
    images: Images | None = None,
) -> PlannedModel:
    """Builds the model named by ``--model``.

    Args:
        name: ``gpt:HIDDENxLAYERS``, a size such as ``4.3b``, a usual name such as ``llama-3.1-8b``, or the path of a
            Hugging Face ``config.json`` or of its folder.
        batch: sequences per step.
        length: tokens per sequence.
        checkpointing: recompute activations in backward, block by block.
        lora_rank: rank of trained adapters on a frozen model; 0: everything is trained.
        prepare: applied to the model after tensor parallelism and before training, such as ``fuse_loss``.
        shared: sequence parallelism; None: none.
        matrices: tensor parallelism; None: none.
        experts: expert parallelism; None: none.
        images: images of each sequence; None: none.

    Raises:
        ValueError: the model does not exist, or cannot be built, called with tokens or sharded, or takes no images.
    """
    config = model_config(name, length)
    of_text = _config_of_text(name, config)
    config.use_cache = of_text.use_cache = False
    num_positions = getattr(of_text, "max_position_embeddings", None)
    is_made_for_length = num_positions == length and gpt_shape(name) is not None
    module = _on_meta(name, config)
    if lora_rank > 0:
        with torch.device("meta"):
            _adapt(module, lora_rank)
    has_table = num_positions is not None and not is_made_for_length and _has_table(module, num_positions)
    most_tokens = num_positions if has_table else None
    if most_tokens is not None and length > most_tokens:
        raise ValueError(f"--seq-len is {length}, but {name} has {most_tokens} positions; give less")
    if checkpointing:
        enable_checkpointing(module)
    num_params = sum(param.numel() for param in module.parameters())
    num_trained = sum(param.numel() for param in module.parameters() if param.requires_grad)
    left_out = _left_out(module, of_text)
    sharded = None if matrices is None else PlannedMatrices(module, batch, length, matrices)
    divided = None if experts is None else PlannedExperts(module, experts)
    if prepare is not None:
        prepare(module)
    batch_here = batch if sharded is None else sharded.batch
    tokens, division, num_image_tokens = torch.empty(batch_here, length, dtype=torch.long, device="meta"), None, 0
    inputs = {"input_ids": tokens, "labels": tokens}
    if images is not None:
        inputs, num_image_tokens = image_batch(name, module, batch_here, length, images)
    if shared is not None and shared.size > 1:
        head_ranks = 1 if matrices is None else matrices.mesh.columns
        division = PlannedDivision(module, batch_here, length, shared.size, shared.links, head_ranks)
        inputs = division.inputs(batch_here, module)
    _check_inputs(name, module, inputs)
    return PlannedModel(
        module=module,
        inputs=inputs,
        num_layers=of_text.num_hidden_layers,
        hidden=of_text.hidden_size,
        num_params=num_params,
        num_trained=num_trained,
        num_active=num_params - sum(left_out.values()),
        num_active_trained=num_trained - sum(num for param, num in left_out.items() if param.requires_grad),
        num_positions=None if is_made_for_length else num_positions,
        most_tokens=most_tokens,
        num_image_tokens=num_image_tokens,
        stack=None if images is None else text_stack(module),
        image_params=frozenset() if images is None else image_params(module),
        division=division,
        matrices=sharded,
        experts=divided,
    )


def _left_out(module: nn.Module, config: Any) -> dict[nn.Parameter, int]:
    """Parameters of experts, and how many elements of each a token does not meet. All experts of a layer are one
    parameter of [experts, ...], beside which their biases are.
    """
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    found = {}
    for child in module.modules():
        own = list(child.parameters(recurse=False))
        num = getattr(child, "num_experts", None)
        if isinstance(chosen, int) and any(param.dim() > 2 and param.shape[0] == num for param in own):
            found |= {param: param.numel() // num * (num - chosen) for param in own if param.shape[0] == num}
    return found


def model_config(name: str, length: int) -> Any:
    """Returns the transformers configuration of the model named by ``--model``, for ``length`` tokens.

    Raises:
        ValueError: the model does not exist.
    """
    mistake = model_mistake(name)
    if mistake is not None:
        raise ValueError(mistake)
    transformers = _transformers()
    config = _gpt_config(name, length) or _known_config(transformers, name)
    if config is not None:
        return config
    try:
        return transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--model {name}: transformers cannot read it: {error}") from error


def _config_of_text(name: str, config: Any) -> Any:
    """The configuration of the part that reads tokens, which is a section in multimodal models."""
    of_text = config.get_text_config()
    for key in ("num_hidden_layers", "hidden_size"):
        if not isinstance(getattr(of_text, key, None), int):
            raise ValueError(
                f"--model {name}: {type(of_text).__name__} has no {key}, by which operations are counted; give the "
                "configuration of a language model"
            )
    return of_text


def _check_inputs(name: str, module: nn.Module, inputs: Mapping[str, Any]) -> None:
    parameters = inspect.signature(module.forward).parameters.values()
    named = [param for param in parameters if param.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    missing = [param.name for param in named if param.default is inspect.Parameter.empty and param.name not in inputs]
    if missing:
        raise ValueError(
            f"--model {name}: {type(module).__name__} cannot be called with tokens alone, it needs {missing[0]} as "
            "well; give the configuration of its language model (text_config)"
        )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"--model needs transformers: pip install transformers ({error})") from error
    return transformers


def whole_model(name: str, length: int) -> nn.Module:
    """The model named by ``--model`` on the meta device, before anything is done to it.

    Raises:
        ValueError: the model does not exist, or cannot be built.
    """
    return _on_meta(name, model_config(name, length))


def _on_meta(name: str, config: Any) -> nn.Module:
    auto_class = _auto_class(_transformers(), name, config)
    with torch.device("meta"):
        return _from_config(auto_class, config)


def _from_config(auto_class: Any, config: Any) -> nn.Module:
    """Builds the model, with fused attention if it supports that."""
    try:
        return auto_class.from_config(config, attn_implementation="sdpa")
    except ValueError:
        return auto_class.from_config(config, attn_implementation="eager")


def _known_config(transformers: Any, name: str) -> Any:
    if Path(name).exists():
        return None
    found = known_name(name)
    if found is None:
        return None
    kind, values = KNOWN_MODELS[found]
    return getattr(transformers, kind)(**copy.deepcopy(values))


def _gpt_config(name: str, length: int) -> Any:
    from transformers import GPT2Config

    shape = gpt_shape(name)
    if shape is None:
        return None
    hidden, layers, heads = shape
    return GPT2Config(
        vocab_size=_VOCAB,
        n_positions=length,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )


def _has_table(module: nn.Module, num_positions: int) -> bool:
    """True if positions are rows of an embedding table, which limits them; some tables have two extra rows."""
    tokens = module.get_input_embeddings()
    tables = (child for child in module.modules() if isinstance(child, nn.Embedding) and child is not tokens)
    return any(num_positions <= table.num_embeddings <= num_positions + 2 for table in tables)


def _auto_class(transformers: Any, name: str, config: Any) -> Any:
    """The auto class of models that take tokens and return their loss."""
    kinds = ["CausalLM", "ImageTextToText", "Seq2SeqLM", "MaskedLM"]
    if hasattr(config, "vision_config"):
        kinds.insert(0, "ImageTextToText")  # with the vision tower
    if any("MaskedLM" in architecture for architecture in config.architectures or ()):
        kinds.reverse()
    for kind in kinds:
        found = getattr(transformers, f"AutoModelFor{kind}", None)
        if found is not None and type(config) in found._model_mapping:
            return found
    raise ValueError(f"--model {name}: transformers has no language model for a {type(config).__name__}")


def enable_checkpointing(model: Any) -> None:
    """Enables activation checkpointing in a Hugging Face model, under the name of the installed version."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})

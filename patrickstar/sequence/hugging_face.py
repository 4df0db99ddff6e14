"""Context parallelism for Hugging Face models without changes to their code.

A call gets this rank's tokens of every tensor, and their positions in the whole sequence
(:mod:`patrickstar.sequence.positions`). Attention goes through transformers' ``AttentionInterface`` and finds the call
in the mask (:mod:`patrickstar.sequence.sharded_attention`). Linear attention, Mamba-2 and convolutions find it in an
argument (:mod:`patrickstar.sequence.recurrent_layers`). Labels and loss are those of the whole batch
(:mod:`patrickstar.sequence.sharded_labels`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from patrickstar.sequence.choice import Attended, choose_mode
from patrickstar.sequence.division import Division, WholeSum
from patrickstar.sequence.group import HybridGroup, SequenceGroup
from patrickstar.sequence.layout import Mode
from patrickstar.sequence.masking import KeyPadding
from patrickstar.sequence.positions import TellPositions
from patrickstar.sequence.recurrent_layers import RecurrentLayers, recurrent_layers
from patrickstar.sequence.sharded_attention import (
    ATTENTION,
    LayerNames,
    ShardedCall,
    noting_layers,
    register_attention,
    running,
)
from patrickstar.sequence.sharded_labels import IGNORED, ShardedLoss, counted_labels, give_a_target, share_of_targets
from patrickstar.sequence.survey import TOKEN_WISE, Survey, check_reached
from patrickstar.sequence.token_scores import gather_scores, has_scores
from patrickstar.sequence.ulysses import query_heads

_KNOWN_LAYERS = ("full_attention", "sliding_attention", *TOKEN_WISE)
_RECURRENT_LAYERS = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
_FILLS = {"labels": IGNORED, "shift_labels": IGNORED}
_BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "labels", "shift_labels")
_NO_TOKENS = ("pixel_values", "pixel_values_videos", "input_features")


class ShardedModel:
    """A Hugging Face model whose calls are sharded over the ranks of ``group``.

    Args:
        model: its parameters may be on any device.
        group: ranks that are called with the same batch.
        mode: attention mode; None: chosen for each length (:func:`patrickstar.sequence.choice.choose_mode`).
        seed: returns the dropout seed of a call, equal on all ranks of the group.
        device: the model's compute device.
        head_ranks: tensor-parallel ranks over which each layer's heads are sharded.
        survey: facts about the model.

    Raises:
        ValueError: its attention cannot be replaced or is not self-attention, or its heads cannot be sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        group: SequenceGroup | HybridGroup,
        mode: Mode | None,
        seed: Callable[[], int],
        device: torch.device,
        head_ranks: int = 1,
        survey: Survey | None = None,
    ):
        check_model(model)
        if mode in (Mode.ULYSSES, Mode.HYBRID):
            query_heads(
                _num_heads(model) // head_ranks, group.heads.size if isinstance(group, HybridGroup) else group.size
            )
        self._model = model
        self._group = group
        self._mode = mode
        self._seed = seed
        self._device = device
        self._head_ranks = head_ranks
        survey = survey or Survey()
        self._positions = survey.positions
        self._layers = LayerNames(model)
        self._recurrent = RecurrentLayers(model)
        shown = {id(layer): self._layers.shown(layer) for layer in self._recurrent.layers.values()}
        self._attending = survey.attending_modules(model) | shown
        self._known = set(inspect.signature(model.forward).parameters)
        self._replaced = model.config._attn_implementation
        self._loss = ShardedLoss(model)
        self._told = TellPositions(model, self._positions)
        register_attention()
        model.set_attn_implementation(ATTENTION)

    def restore(self) -> None:
        """Restores attention and loss function."""
        self._model.set_attn_implementation(self._replaced)
        self._recurrent.restore()
        self._told.remove()
        self._loss.restore()

    def divides(self, kwargs: dict[str, Any]) -> bool:
        """Tests whether a call with these arguments is sharded; calls with a cache, as in ``generate``, are not."""
        cached = [name for name in ("cache", "past_key_values", "use_cache") if kwargs.get(name) not in (None, False)]
        return not cached and any(kwargs.get(name) is not None for name in ("input_ids", "inputs_embeds"))

    def whole_call(self) -> WholeCall:
        """Context around a call that is not sharded: every rank computes all of it."""
        self._loss.begin({})
        return WholeCall(self._model, self._replaced)

    def with_target_count(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Adds the number of targets to a call's arguments, so that it stays when samples are left out.

        Raises:
            ValueError: labels are not one per token.
        """
        counted = counted_labels(self._model, kwargs)
        return {**kwargs, "num_items_in_batch": counted["num_items_in_batch"]} if counted else kwargs

    def divide(self, kwargs: dict[str, Any]) -> ShardedArguments:
        """This rank's shard of a call's arguments.

        Raises:
            ValueError: arguments do not fit together, or cannot be sharded.
        """
        _check_only_tokens(self._model, kwargs)
        tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        batch, length = tokens.shape[:2]
        division = Division(self._group.rank, self._group.size, self._mode_for(batch, length), length)
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        padding = _padding(mask, division, self._device)
        documents = _documents(positions, mask, batch)
        if positions is None:
            positions = self._positions.of(tokens, mask)
        labels = counted_labels(self._model, kwargs)
        share = share_of_targets(labels["labels"], division) if labels else None
        count = {"num_items_in_batch": labels.pop("num_items_in_batch")} if labels else {}
        result = {name: value for name, value in kwargs.items() if name not in _BY_TOKEN} | count
        whole = {**kwargs, **labels, "position_ids": positions if "position_ids" in self._known else None}
        if "attention_mask" in self._known:
            whole["attention_mask"] = tokens.new_ones((batch, length), dtype=torch.long) if mask is None else mask
        for name, value in whole.items():
            if _is_by_token(name, value, batch, length):
                result[name] = _local(name, value, division)
        self._loss.begin({name: result[name] for name in ("shift_labels", *count) if name in result})
        if share is not None:
            give_a_target(result)
        if "use_cache" in self._known:
            result["use_cache"] = False
        call = ShardedCall(
            group=self._group,
            division=division,
            documents=documents,
            padding=padding,
            seed=self._seed(),
            layers=self._layers,
            positions=_local("position_ids", positions, division),
        )
        result |= self._recurrent.arguments(call)
        num_scored = length if kwargs.get("shift_labels") is not None else length - 1
        return ShardedArguments(result, call, share, num_scored)

    @contextlib.contextmanager
    def running(self, arguments: ShardedArguments) -> Iterator[None]:
        """Context around the forward of a sharded call.

        Raises:
            ValueError: some layer did not compute its attention over the whole sequence.
        """
        with running(arguments.call), noting_layers() as reached:
            yield
        check_reached(self._model, self._attending, reached)

    def combine(self, output: Any, arguments: ShardedArguments) -> Any:
        """The output with the loss of the whole batch. Token scores, which some models return instead of logits, are
        all-gathered; other outputs stay this rank's tokens.
        """
        if arguments.share is None:
            return output
        is_tuple = isinstance(output, tuple) and not hasattr(output, "loss")
        loss = output[0] if is_tuple else output.loss
        if has_scores(output):
            gather_scores(output, self._group, arguments.division, arguments.num_scored)
        elif self._loss.num_calls == 0:  # the model averaged its tokens' losses itself (`ShardedLoss`)
            loss = loss * arguments.share.to(loss.device, loss.dtype)
        whole = WholeSum.apply(loss, self._group)
        if is_tuple:
            return (whole, *output[1:])
        output.loss = whole
        return output

    def _mode_for(self, batch: int, length: int) -> Mode:
        if self._mode is not None:
            return self._mode
        work = attended(self._model, batch, length)
        work = dataclasses.replace(
            work, heads=work.heads // self._head_ranks, key_heads=max(work.key_heads // self._head_ranks, 1)
        )
        return choose_mode(work, self._group.size).mode


@dataclasses.dataclass(frozen=True)
class ShardedArguments:
    """This rank's arguments of one call."""

    kwargs: dict[str, Any]
    call: ShardedCall
    """The call's state for attention."""
    share: torch.Tensor | None
    """This rank's fraction of the whole batch's targets; None without labels."""
    num_scored: int
    """Tokens of each sequence that have a next token as target, if the model returns token scores."""

    @property
    def division(self) -> Division:
        """The sharding of the call's sequences."""
        return self.call.division


class WholeCall:
    """Context in which the model has its own attention."""

    def __init__(self, model: nn.Module, replaced: str):
        self._model, self._replaced = model, replaced

    def __enter__(self) -> None:
        self._model.set_attn_implementation(self._replaced)

    def __exit__(self, *error: object) -> None:
        self._model.set_attn_implementation(ATTENTION)


def find_model(module: nn.Module) -> nn.Module | None:
    """The Hugging Face model that ``module`` is or wraps; None if there is none. The outermost one is taken."""
    transformers = sys.modules.get("transformers")
    base = getattr(transformers, "PreTrainedModel", None) if transformers is not None else None
    if base is None:
        return None
    return next((child for child in module.modules() if isinstance(child, base)), None)


def check_model(model: nn.Module) -> None:
    """Raises ValueError, naming the model, if its attention cannot be context-parallel."""
    name, config = type(model).__name__, model.config
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        raise ValueError(
            f"{name} computes its attention itself, not through transformers' AttentionInterface, so its sequences "
            "cannot be divided; leave sequence_parallel out, or write the model with patrickstar.sequence.attention"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model, whose two sequences are not divided; leave "
                         "sequence_parallel out")  # fmt: skip
    text = config.get_text_config()
    if _size(model, "num_attention_heads") is None:
        raise ValueError(
            f"{name} has no attention, by whose heads sequences would be divided; leave sequence_parallel out"
        )
    known = {*_KNOWN_LAYERS, *(_RECURRENT_LAYERS if recurrent_layers(model) else ())}
    others = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - known)
    if others or getattr(text, "attention_chunk_size", None):
        raise ValueError(
            f"{name} has layers of {', '.join(others) or 'chunked attention'}, whose sequences cannot be divided; "
            "leave sequence_parallel out"
        )
    if getattr(text, "output_router_logits", False):
        raise ValueError(
            f"{name} adds a loss of its routers (output_router_logits), which is no sum over tokens; set it to False, "
            "or leave sequence_parallel out"
        )


def _check_only_tokens(model: nn.Module, kwargs: dict[str, Any]) -> None:
    other = next((name for name in _NO_TOKENS if kwargs.get(name) is not None), None)
    if other is not None:
        raise ValueError(
            f"{type(model).__name__} is given {other}, but only tokens are divided among the ranks of a sequence; give "
            "batches without it, or leave sequence_parallel out"
        )


def attended(model: nn.Module, batch: int, length: int) -> Attended:
    """Shapes of one layer's attention in a call with ``batch`` sequences of ``length`` tokens."""
    heads = _num_heads(model)
    return Attended(
        batch=batch,
        heads=heads,
        key_heads=_size(model, "num_key_value_heads") or heads,
        head_dim=_size(model, "head_dim") or model.config.get_text_config().hidden_size // heads,
        length=length,
        causal=_is_causal(model),
    )


def _is_by_token(name: str, value: Any, batch: int, length: int) -> bool:
    """True if an argument has one entry per token."""
    if not isinstance(value, torch.Tensor):
        return False
    return name in _BY_TOKEN or (value.dim() >= 2 and tuple(value.shape[:2]) == (batch, length))


def _local(name: str, value: torch.Tensor, division: Division) -> torch.Tensor:
    """This rank's tokens of an argument."""
    along = value.dim() - 1 if value.dim() < 3 else 1
    if value.dim() > 3 and name in _BY_TOKEN or value.shape[along] != division.length:
        raise ValueError(
            f"{name} is {list(value.shape)}, but the sequence has {division.length} tokens; give all ranks of a "
            "sequence the whole of it, [batch, tokens]"
        )
    return division.local(value, _FILLS.get(name, 0), along)


def _num_heads(model: nn.Module) -> int:
    return model.config.get_text_config().num_attention_heads


def _size(model: nn.Module, name: str) -> int | None:
    """A size that all layers share; None if the configuration has none."""
    try:
        return getattr(model.config.get_text_config(), name, None)
    except RuntimeError:  # transformers has it per layer
        return None


def _is_causal(model: nn.Module) -> bool:
    modules = (module for module in model.modules() if hasattr(module, "is_causal"))
    return next((module.is_causal for module in modules), True)


def _padding(mask: torch.Tensor | None, division: Division, device: torch.device) -> KeyPadding | None:
    """Padding from an attention mask [batch, tokens]; None if all tokens are real."""
    if mask is None:
        return None
    if mask.dim() != 2 or mask.shape[1] != division.length:
        raise ValueError(
            f"attention_mask is {list(mask.shape)}; with sequence_parallel give [batch, tokens], 0 for padding, or "
            "leave it out"
        )
    real = mask.bool()
    if bool(real.all()):
        return None
    return KeyPadding(division.padded(real, False), device)


def _documents(positions: torch.Tensor | None, mask: torch.Tensor | None, batch: int) -> tuple[int, ...] | None:
    """First tokens of the documents in a packed batch, found as transformers does: where positions restart."""
    if positions is None or mask is not None:
        return None
    steps = positions[:, 1:] - positions[:, :-1]
    if bool((steps == 1).all()):
        return None
    if positions.shape[0] > 1 and not bool((steps == steps[:1]).all()):
        raise ValueError(
            f"position_ids begin anew at other places in each of {batch} sequences; with sequence_parallel pack one "
            "sequence in a batch"
        )
    begins = (steps[0] != 1).nonzero().flatten() + 1
    return (0, *begins.tolist(), positions.shape[1])

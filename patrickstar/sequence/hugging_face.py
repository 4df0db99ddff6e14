"""Models of Hugging Face whose sequences several ranks share, without a change of their code.

Their attention goes through transformers' ``AttentionInterface``, where :func:`divided_attention` stands under the name
:data:`ATTENTION`. What it must know of the call travels with the keyword arguments that models hand down to it, so that
recomputation in backward has it too. transformers makes no mask for these calls ([Note: no mask is made]).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.sequence.attention import attention
from patrickstar.sequence.choice import Attended, choose_mode
from patrickstar.sequence.division import Division, WholeSum
from patrickstar.sequence.group import HybridGroup, SequenceGroup
from patrickstar.sequence.layout import Mode
from patrickstar.sequence.masking import Padding
from patrickstar.sequence.token_scores import gather_scores, has_scores
from patrickstar.sequence.ulysses import query_heads

ATTENTION = "patrickstar_sequence"
"""Its name among transformers' attention functions."""
CALL = "patrickstar_sequence"
"""The keyword argument that models hand down to it."""
_IGNORED = -100
_SHIFTED_LOSSES = ("ForCausalLM",)
_TOKEN_LOSSES = ("ForMaskedLM", "ForTokenClassification")
_KNOWN_LAYERS = ("full_attention", "sliding_attention")
_FILLS = {"labels": _IGNORED, "shift_labels": _IGNORED}
_BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "labels", "shift_labels")
# Other numbers than softmax of scaled scores: not computed here.
_OTHER_SCORES = ("softcap", "s_aux", "position_bias")


@dataclasses.dataclass(frozen=True, eq=False)
class DividedCall:
    """What attention must know of one call of the model."""

    group: SequenceGroup | HybridGroup
    division: Division
    documents: tuple[int, ...] | None
    padding: Padding | None
    seed: int
    layers: dict[int, int]
    """The index of each module of the model, by its id: layers drop other probabilities than each other."""


class DividedModel:
    """A model of Hugging Face, whose calls are divided among the ranks of ``group``.

    Args:
        model: its parameters may be anywhere.
        group: ranks that are called with the same batch each.
        mode: how attention is computed; None: chosen for each length (:func:`patrickstar.sequence.choice.choose_mode`).
        seed: gives that of dropout in attention for a call, the same on all ranks of the group.
        device: that the model computes on.
        head_ranks: ranks that divide the heads of each layer, with whose other heads this one has nothing to do.

    Raises:
        ValueError: its attention cannot be replaced, or is not one of a sequence to itself, or its heads cannot be
            divided.
    """

    def __init__(
        self,
        model: nn.Module,
        group: SequenceGroup | HybridGroup,
        mode: Mode | None,
        seed: Callable[[], int],
        device: torch.device,
        head_ranks: int = 1,
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
        self._layers = {id(module): index for index, module in enumerate(model.modules())}
        self._known = set(inspect.signature(model.forward).parameters)
        self._replaced = model.config._attn_implementation
        self._loss = _CountedLoss(model)
        _register()
        model.set_attn_implementation(ATTENTION)

    def restore(self) -> None:
        """Its attention and its loss are what they were."""
        self._model.set_attn_implementation(self._replaced)
        self._loss.restore()

    def divides(self, kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments is divided: not one that goes on from a cache, as in ``generate``."""
        cached = [name for name in ("cache", "past_key_values", "use_cache") if kwargs.get(name) not in (None, False)]
        return not cached and any(kwargs.get(name) is not None for name in ("input_ids", "inputs_embeds"))

    def whole_call(self) -> WholeCall:
        """Around a call that is not divided: every rank computes all of it."""
        return WholeCall(self._model, self._replaced)

    def with_target_count(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call, which say how many targets it has: so many it has still when samples are left out.

        Raises:
            ValueError: labels are of another kind than one for each token.
        """
        counted = self._with_labels(kwargs)
        return {**kwargs, "num_items_in_batch": counted["num_items_in_batch"]} if counted else kwargs

    def divide(self, kwargs: dict[str, Any]) -> DividedArguments:
        """This rank's part of the arguments of a call.

        Raises:
            ValueError: arguments do not go together, or cannot be divided.
        """
        tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        batch, length = tokens.shape[:2]
        division = Division(self._group.rank, self._group.size, self._mode_for(batch, length), length)
        result = {name: value for name, value in kwargs.items() if name not in _BY_TOKEN}
        with_labels = self._with_labels(kwargs)
        share: torch.Tensor | None = None
        if with_labels:
            share = _share_of_targets(with_labels, division)
            result["num_items_in_batch"] = with_labels.pop("num_items_in_batch")
        positions = kwargs.get("position_ids")
        documents = _documents(positions, kwargs.get("attention_mask"), batch)
        if positions is None and "position_ids" in self._known:
            positions = torch.arange(length, device=tokens.device).unsqueeze(0)
        for name, value in {**kwargs, **with_labels, "position_ids": positions}.items():
            if name in _BY_TOKEN and value is not None:
                _check_shape(name, value, length)
                result[name] = division.local(value, _FILLS.get(name, 0), value.dim() - 1 if value.dim() < 3 else 1)
        if share is not None:
            _give_a_target(result)
        result[CALL] = DividedCall(
            group=self._group,
            division=division,
            documents=documents,
            padding=_padding(kwargs.get("attention_mask"), division, self._device),
            seed=self._seed(),
            layers=self._layers,
        )
        if "attention_mask" in self._known:
            result["attention_mask"] = _no_mask(tokens)
        if "use_cache" in self._known:
            result["use_cache"] = False
        self._loss.num_calls = 0
        num_scored = length if kwargs.get("shift_labels") is not None else length - 1
        return DividedArguments(result, division, share, num_scored)

    def combine(self, output: Any, arguments: DividedArguments) -> Any:
        """What the call gave, with the loss of the whole batch, and scores of all tokens where it gave scores instead
        of logits; all else are this rank's tokens.
        """
        if arguments.share is None:
            return output
        is_tuple = isinstance(output, tuple) and not hasattr(output, "loss")
        loss = output[0] if is_tuple else output.loss
        if has_scores(output):
            gather_scores(output, self._group, arguments.division, arguments.num_scored)
        elif self._loss.num_calls == 0:  # [Note: means and sums]
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

    def _with_labels(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Labels shifted before they are divided, and what the sum of the tokens' losses is divided by."""
        labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
        if labels is None and shifted is None:
            return {}
        kind = getattr(self._model, "loss_type", None) or _SHIFTED_LOSSES[0]
        if kind not in (*_SHIFTED_LOSSES, *_TOKEN_LOSSES):
            raise ValueError(
                f"{type(self._model).__name__} has labels of another kind than one for each token ({kind}); with "
                "sequence_parallel compute the loss of the tokens of each rank yourself, from its outputs"
            )
        result = {"labels": labels if labels is not None else shifted}
        if kind in _SHIFTED_LOSSES:
            if shifted is None:
                shifted = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
            result["shift_labels"] = shifted
        counted = result.get("shift_labels", result["labels"])
        given = kwargs.get("num_items_in_batch")
        result["num_items_in_batch"] = (counted != _IGNORED).sum() if given is None else given
        return result


@dataclasses.dataclass(frozen=True)
class DividedArguments:
    """Of one call: what this rank gives the model."""

    kwargs: dict[str, Any]
    division: Division
    share: torch.Tensor | None
    """Of the targets of the whole batch, those of this rank; None: there are no labels."""
    num_scored: int
    """Tokens of each sequence of which the next one is a target, where the model returns scores of tokens."""


class _CountedLoss:
    """The model's loss function. [Note: means and sums] transformers gives it ``num_items_in_batch``, by which it
    divides the sum of the tokens' losses. Some models do not call it and make the mean of their tokens themselves; who
    has counted its calls knows.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._before = vars(model).get("_loss_function")
        self._call = model.loss_function
        self.num_calls = 0
        model.loss_function = self

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As it was."""
        self.num_calls += 1
        return self._call(*args, **kwargs)

    def restore(self) -> None:
        """The model has the one it had."""
        if self._before is None:
            vars(self._model).pop("_loss_function", None)
        else:
            self._model.loss_function = self._before


class WholeCall:
    """While it lasts, the model's attention is what it was."""

    def __init__(self, model: nn.Module, replaced: str):
        self._model, self._replaced = model, replaced

    def __enter__(self) -> None:
        self._model.set_attn_implementation(self._replaced)

    def __exit__(self, *error: object) -> None:
        self._model.set_attn_implementation(ATTENTION)


def find_model(module: nn.Module) -> nn.Module | None:
    """The model of Hugging Face that ``module`` is, or wraps; None where there is none, or there are several."""
    transformers = sys.modules.get("transformers")
    base = getattr(transformers, "PreTrainedModel", None) if transformers is not None else None
    if base is None:
        return None
    return next((child for child in module.modules() if isinstance(child, base)), None)


def check_model(model: nn.Module) -> None:
    """Raises ValueError, which names the model, where its attention over a divided sequence would be another one."""
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
    others = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - set(_KNOWN_LAYERS))
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


def attended(model: nn.Module, batch: int, length: int) -> Attended:
    """One layer's attention of the model in a call with ``batch`` sequences of ``length`` tokens."""
    config, heads = model.config.get_text_config(), _num_heads(model)
    return Attended(
        batch=batch,
        heads=heads,
        key_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        length=length,
        causal=_is_causal(model),
    )


def attention_for(arguments: Mapping[str, Any]) -> Callable[..., tuple[torch.Tensor, None]] | None:
    """Of the keyword arguments that a model hands down in a call: what computes attention in it, None where its
    sequences are not divided. For attention modules that do not ask ``AttentionInterface``.
    """
    return None if arguments.get(CALL) is None else divided_attention


def divided_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: [batch, heads, tokens, head_dim] in, [batch, tokens, heads, head_dim] out.

    Raises:
        ValueError: the layer asks for scores of another kind, or for keys of another sequence.
    """
    call: DividedCall | None = kwargs.pop(CALL, None)
    if call is None:  # of a call that is not divided, in its recomputation
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    check_layer(module, query, key, kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = _window(module, sliding_window)
    length = call.division.length
    out = attention(
        query,
        key,
        value,
        call.group,
        call.division.mode,
        causal=causal,
        window=None if window is None else (window - 1, -1 if causal else window - 1),
        cu_seqlens=call.documents,
        length=length,
        padding=call.padding,
        dropout_p=dropout,
        seed=call.seed * 2**20 + call.layers.get(id(module), 0),
        scale=scaling,
    )
    return out.transpose(1, 2).contiguous(), None


def check_layer(module: nn.Module, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Raises ValueError, which names the layer, where it asks for scores of another kind, or for other keys."""
    name = type(module).__name__
    for other in _OTHER_SCORES:
        if kwargs.get(other) is not None:
            raise ValueError(f"{name} asks for {other}, which attention over a divided sequence has not; leave "
                             "sequence_parallel out")  # fmt: skip
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{name} has {query.shape[-2]} queries and {key.shape[-2]} keys; a divided sequence attends to itself "
            "alone: call the model without a cache"
        )


def _window(module: nn.Module, given: int | None) -> int | None:
    """Tokens back that a layer sees, its own included; some models say it in their mask alone."""
    if given is not None:
        return given
    config = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and index is not None and kinds[index] == "sliding_attention":
        return config.sliding_window
    return None


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    AttentionInterface.register(ATTENTION, divided_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)


def _share_of_targets(labels: dict[str, torch.Tensor], division: Division) -> torch.Tensor:
    """Of all tokens that count, how many are this rank's: float32, no dimensions; 0 where none counts."""
    counted = labels.get("shift_labels", labels["labels"]) != _IGNORED
    return division.local(counted, False).sum() / counted.sum().clamp(min=1)


def _give_a_target(arguments: dict[str, Any]) -> None:
    """A rank without targets has one, so that the mean of its losses is a number; its share is 0, or its loss is.
    Where the loss is a sum, shifted labels are looked at alone, and are left as they are.
    """
    labels = arguments["labels"]
    if "shift_labels" in arguments:
        return
    none = (labels == _IGNORED).all()
    first = labels.flatten()[:1]
    arguments["labels"] = torch.cat([torch.where(none, 0, first), labels.flatten()[1:]]).view_as(labels)


def _no_mask(tokens: torch.Tensor) -> torch.Tensor:
    """[Note: no mask is made] transformers takes a mask of four dimensions as it is, and so makes none of tokens x
    tokens elements. :func:`divided_attention` does not look at it.
    """
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=tokens.device)


def _num_heads(model: nn.Module) -> int:
    return model.config.get_text_config().num_attention_heads


def _is_causal(model: nn.Module) -> bool:
    modules = (module for module in model.modules() if hasattr(module, "is_causal"))
    return next((module.is_causal for module in modules), True)


def _check_shape(name: str, value: torch.Tensor, length: int) -> None:
    along = value.dim() - 1 if value.dim() < 3 else 1
    if value.dim() > 3 or value.shape[along] != length:
        raise ValueError(
            f"{name} is {list(value.shape)}, but the sequence has {length} tokens; give all ranks of a sequence the "
            "whole of it, [batch, tokens]"
        )


def _padding(mask: torch.Tensor | None, division: Division, device: torch.device) -> Padding | None:
    """Of an attention mask [batch, tokens]; None where all tokens are real."""
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
    return Padding(division.padded(real, False), device)


def _documents(positions: torch.Tensor | None, mask: torch.Tensor | None, batch: int) -> tuple[int, ...] | None:
    """Where documents of a packed batch begin, as transformers finds them: where positions begin again."""
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

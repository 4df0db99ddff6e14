"""Small batches of tokens to try a Hugging Face model with before any data is known."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from patrickstar.sequence.hugging_face import find_model
from patrickstar.sequence.sharded_labels import IGNORED, has_sequence_labels, has_token_labels

_NUM_PADDED = 3
_MOST_WORDS = 2**10
_AS_DATA = ("pad", "mask", "unk", "sep")
"""Special tokens that occur in data."""
_USED = {f"{name}_token_id" for name in _AS_DATA}


def has_loss(model: nn.Module) -> bool:
    """True if ``model`` computes the loss of labels, one per token or per sequence."""
    return _takes(model, "labels") and (has_token_labels(model) or has_sequence_labels(model))


def cut_vocabulary(module: nn.Module) -> None:
    """Removes unused words from the model in ``module``, whose tables would take most of a trial's time."""
    model = find_model(module)
    table = _table(model)
    used = [token for name, token in _special_tokens(model) if name in _USED]
    number = max(_MOST_WORDS, *(token + 1 for token in used)) if used else _MOST_WORDS
    if table is not None and len(table) > number:
        model.resize_token_embeddings(number, mean_resizing=False)


def trial_batches(model: nn.Module, batch: int, length: int) -> Iterator[dict[str, Any]]:
    """Keyword arguments for calls of ``model``, [batch, length] each, with labels if it computes a loss.

    The first batch has special cases: padding within a sequence, padding on the left by the mask, masked tokens,
    ignored labels. The second has words alone, for a model that cannot be called with the first.

    Raises:
        ValueError: the model has no token embedding.
    """
    special = dict(_special_tokens(model))
    words = _words(model, set(special.values()))
    generator = torch.Generator().manual_seed(0)
    tokens = words[torch.randint(len(words), (batch, length), generator=generator, device="cpu")]
    others = {"use_cache": False} if _takes(model, "use_cache") else {}
    yield {**_as_data(model, tokens, special, generator), **others}
    yield {"input_ids": tokens, **({"labels": _labels(model, tokens)} if has_loss(model) else {}), **others}


def _words(model: Any, special: set[int]) -> torch.Tensor:
    """Tokens without a special meaning to the model."""
    table = _table(model)
    if table is None:
        raise ValueError(f"{type(model).__name__} has no table of tokens to try it with")
    most = min(len(table), model.config.get_text_config().vocab_size, _MOST_WORDS)
    return torch.tensor([token for token in range(most) if token not in special] or [0], device="cpu")


def _table(model: Any) -> torch.Tensor | None:
    """Token embedding, [words, features]; None: the model has none."""
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    weight = getattr(table, "weight", None)
    return weight if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None


def _as_data(
    model: nn.Module, words: torch.Tensor, special: dict[str, int], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    tokens, (batch, length) = words.clone(), words.shape
    for place, name in enumerate(_AS_DATA, 1):
        token = special.get(f"{name}_token_id")
        if token is not None and place < length // 2 and token < model.config.get_text_config().vocab_size:
            tokens[0, place] = token
    found = {"input_ids": tokens}
    if not has_loss(model):
        return found
    labels, is_by_token = _labels(model, tokens), has_token_labels(model)
    if is_by_token:
        labels[torch.rand(tokens.shape, generator=generator, device="cpu") < 0.2] = IGNORED
    mask = torch.ones_like(tokens)
    if batch > 1 and length > 2 * _NUM_PADDED:
        mask[1:, :_NUM_PADDED] = 0
        if is_by_token:
            labels[1:, : _NUM_PADDED + 1] = IGNORED  # kernels differ in their predictions from padding
        tokens[1:, :_NUM_PADDED] = special.get("pad_token_id", 0)
    if _takes(model, "attention_mask"):
        found["attention_mask"] = mask
    return {**found, "labels": labels}


def _labels(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Labels [batch, length] of tokens, or those of a classifier: int64, or float32 scores of each label."""
    number = getattr(model.config, "num_labels", 1)
    if not has_sequence_labels(model):
        return tokens % number if getattr(model, "loss_type", None) == "ForTokenClassification" else tokens.clone()
    kind = model.config.problem_type or ("regression" if number == 1 else "single_label_classification")
    if kind == "single_label_classification":
        return torch.arange(len(tokens), device="cpu") % number
    shape = (len(tokens),) if kind == "regression" and number == 1 else (len(tokens), number)
    return (torch.arange(math.prod(shape), device="cpu") % 2).float().view(shape)


def with_another_first_token(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with another first token in its first sequence, and the same labels."""
    tokens = batch["input_ids"].clone()
    tokens[0, 0] = tokens[0, -1] if tokens[0, -1] != tokens[0, 0] else tokens[0, -2]
    return {**batch, "input_ids": tokens}


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _special_tokens(model: Any) -> Iterator[tuple[str, int]]:
    for config in (model.config, model.config.get_text_config()):
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= 0:
                yield name, value

"""Labels under context parallelism: each rank's targets, and its part of the loss."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from patrickstar.sequence.division import Division

IGNORED = -100
"""The label that transformers leaves out of a loss."""
_SHIFTED_LOSSES = ("ForCausalLM", "ForConditionalGeneration")
_TOKEN_LOSSES = ("ForMaskedLM", "ForTokenClassification")
_SEQUENCE_LOSS = "ForSequenceClassification"


class ShardedLoss:
    """Replaces the model's loss function.

    transformers passes ``num_items_in_batch``, the divisor of the summed token losses, to a model's loss function. Some
    models do not pass it on, so this object adds it. Other models average their tokens' losses without calling the loss
    function. ``num_calls`` tells them apart.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._before = vars(model).get("_loss_function")
        self._call = model.loss_function
        params = inspect.signature(self._call).parameters
        self._takes_all = any(param.kind is param.VAR_KEYWORD for param in params.values())
        self._taken = set(params)
        self._targets: dict[str, Any] = {}
        self.num_calls = 0
        """Calls since :meth:`begin`."""
        model.loss_function = self

    def begin(self, targets: dict[str, Any]) -> None:
        """Begins a model call. ``targets`` are arguments of its loss function that the model may not pass on."""
        self._targets = {name: value for name, value in targets.items() if self._takes_all or name in self._taken}
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Calls the replaced function with this rank's targets."""
        self.num_calls += 1
        given = {name: value for name, value in kwargs.items() if value is not None}
        return self._call(*args, **{**kwargs, **self._targets, **given})

    def restore(self) -> None:
        """Restores the model's loss function."""
        if self._before is None:
            vars(self._model).pop("_loss_function", None)
        else:
            self._model.loss_function = self._before


def has_token_labels(model: nn.Module) -> bool:
    """True if the model has one label per token."""
    return _loss_type(model) in (*_SHIFTED_LOSSES, *_TOKEN_LOSSES)


def has_sequence_labels(model: nn.Module) -> bool:
    """True if the model has one label, or one of each kind, per sequence."""
    return _loss_type(model) == _SEQUENCE_LOSS


def counted_labels(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Shifts labels before they are sharded, and counts the targets.

    Args:
        model: a Hugging Face model.
        kwargs: arguments of a call with whole sequences.

    Returns:
        ``labels``, ``shift_labels`` if the model predicts next tokens, and ``num_items_in_batch``; empty without
        labels.

    Raises:
        ValueError: labels are not one per token.
    """
    labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
    if labels is None and shifted is None:
        return {}
    if not has_token_labels(model):
        raise ValueError(
            f"{type(model).__name__} has labels of another kind than one for each token ({_loss_type(model)}); with "
            "sequence_parallel compute the loss of the tokens of each rank yourself, from its outputs"
        )
    result = {"labels": labels if labels is not None else shifted}
    if _loss_type(model) in _SHIFTED_LOSSES:
        if shifted is None:
            shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        result["shift_labels"] = shifted
    counted = result.get("shift_labels", result["labels"])
    given = kwargs.get("num_items_in_batch")
    result["num_items_in_batch"] = (counted != IGNORED).sum() if given is None else given
    return result


def share_of_targets(labels: torch.Tensor, division: Division) -> torch.Tensor:
    """This rank's fraction of the labels that count: a float32 scalar, 0 if none counts. For models that average over
    the labels they get.
    """
    counted = labels != IGNORED
    return division.local(counted, False).sum() / counted.sum().clamp(min=1)


def give_a_target(arguments: dict[str, Any]) -> None:
    """Gives a rank without targets one, so that its mean loss is a number; its weight is 0. Shifted labels, whose
    losses are summed, are unchanged.
    """
    labels = arguments["labels"]
    none = (labels == IGNORED).all()
    first = labels.flatten()[:1]
    arguments["labels"] = torch.cat([torch.where(none, 0, first), labels.flatten()[1:]]).view_as(labels)


def _loss_type(model: nn.Module) -> str:
    return getattr(model, "loss_type", None) or _SHIFTED_LOSSES[0]

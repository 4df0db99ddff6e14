"""Losses of Hugging Face's models on a mesh: the mean over the whole batch, from the ranks' logits or scores.

transformers is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from patrickstar.tensor2d.group import MeshGroup
from patrickstar.tensor2d.lines import Line
from patrickstar.tensor2d.losses import CrossEntropy2D
from patrickstar.tensor2d.sums import gathered


class TokenLoss:
    """Replaces a language model's ``loss_function``: the mean over the whole batch, with labels of the same tokens
    (masked language models).
    """

    def __init__(self, vocabulary: int, group: MeshGroup):
        self._vocabulary, self._group = vocabulary, group

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | float | None = None,
        ignore_index: int = -100,
        **_: Any,
    ) -> torch.Tensor:
        """Same arguments as transformers' losses; ``num_items_in_batch`` counts labels of all rows.

        Raises:
            ValueError: there are no labels.
        """
        if labels is None:
            raise ValueError("a loss needs labels")
        group = self._group
        # whole logits, since autograd is off: each column computes the whole loss
        if logits.shape[-1] == self._vocabulary:
            group = MeshGroup(group.along_rows, Line(), group.world_group)
        loss = CrossEntropy2D(self._vocabulary, group, ignore_index=ignore_index)
        return loss(logits, labels.reshape(logits.shape[:-1]).to(logits.device), num_items_in_batch)

    def attach(self, model: Any) -> None:
        """Makes ``model`` compute its loss here. Calls without labels are unchanged."""
        aside = _LabelsAside(lambda logits, **given: model.loss_function(logits, **given))
        model.loss_function = self
        model.register_forward_pre_hook(aside.take, with_kwargs=True)
        model.register_forward_hook(aside.give)


class CausalLoss(TokenLoss):
    """Loss of a causal language model: labels are shifted to the tokens before them."""

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Same arguments as ``ForCausalLMLoss`` of transformers; ``num_items_in_batch`` counts labels of all rows.

        Raises:
            ValueError: there are no labels.
        """
        if shift_labels is None and labels is not None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return super().__call__(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index)

    def attach(self, model: Any) -> None:
        """Sets the ``loss_function`` that ``model``'s forward calls."""
        model.loss_function = self


class LabelLoss:
    """Loss of a classifier whose samples are sharded over rows: the model's own loss of the scores of all rows.

    Args:
        model: whose ``loss_function`` computes the loss of scores and labels, as transformers' classifiers have it.
        rows: the ranks that have other samples.
    """

    def __init__(self, model: Any, rows: Line):
        self._compute: Callable[..., torch.Tensor] = model.loss_function
        self._config, self._rows = model.config, rows

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, **given: Any) -> torch.Tensor:
        """The loss of scores [b/r, ...] and labels [b/r, ...] of this row's samples, over all rows."""
        scores = gathered(logits, self._rows, 0)
        wanted = torch.cat(self._rows.gather(labels.to(logits.device)))
        return self._compute(logits=scores, labels=wanted, pooled_logits=scores, config=self._config, **given)

    def attach(self, model: Any) -> None:
        """Makes ``model`` compute its loss here."""
        aside = _LabelsAside(self)
        model.register_forward_pre_hook(aside.take, with_kwargs=True)
        model.register_forward_hook(aside.give)


class _LabelsAside:
    """For models whose forward computes the loss itself, from whole logits. Hooks withhold the labels and add the loss
    that ``compute`` returns for the output's logits and the labels.
    """

    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        self._compute = compute
        self._given: dict[str, Any] = {}

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Removes labels from the keyword arguments and keeps them until the call ends."""
        others = dict(kwargs)
        self._given = {name: others.pop(name) for name in ("labels", "num_items_in_batch") if name in others}
        return args, others

    def give(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Adds the loss to the output if there were labels."""
        given, self._given = self._given, {}
        if given.get("labels") is None:
            return output
        is_tuple = isinstance(output, tuple)
        loss = self._compute(output[0] if is_tuple else output.logits, **given)
        return (loss, *output) if is_tuple else type(output)(**{**output, "loss": loss})


_LOSSES: dict[str | None, type[TokenLoss]] = {
    "ForCausalLM": CausalLoss,
    "ForMaskedLM": TokenLoss,
    None: CausalLoss,
}
"""By ``loss_type`` of transformers; models without one use the first."""


def replace_loss(model: Any, vocabulary: int, group: MeshGroup) -> None:
    """Makes a causal or masked language model compute its loss from logits whose vocabulary is sharded over ``group``'s
    columns. Other models refuse labels.
    """
    kind = getattr(model, "loss_type", None)
    if hasattr(type(model), "loss_function") and kind in _LOSSES:
        _LOSSES[kind](vocabulary, group).attach(model)
    else:
        model.register_forward_pre_hook(_refuse_labels, with_kwargs=True)


def _refuse_labels(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None:
        raise ValueError(
            f"{type(module).__name__} would compute its loss from all logits, of which a rank has a part; call it "
            "without labels, and CrossEntropy2D with its logits"
        )

"""A training run: its task and output folders, its results, its progress."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar.finetune.batches import Batch, Score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The data of a training run, and its scores to beat."""

    name: str
    train: Batch
    held_out: Batch
    baseline: Score
    """The trivial answer's score on ``held_out``."""
    baseline_name: str
    shift: bool = False
    """True if the logits at position t are for the label at t + 1 (causal language models)."""
    prepare: Callable[[Batch, torch.Generator], Batch] | None = None
    """Makes a training batch from rows of ``train``, for example by masking tokens."""
    collate: Callable[[Batch], Batch] | None = None
    """Makes the model's arguments from a batch, in training and evaluation, for example without common padding."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of each forward."""
    before: Callable[[nn.Module], None] | None = None
    """Called with the model, on all ranks, before the first step of a run."""
    after: Callable[[nn.Module], None] | None = None
    """Called with the model, on all ranks, after the last step."""
    test: Batch | None = None
    """Scored once, after the training."""
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further properties that must be equal when the run is resumed, by command-line names."""

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The arguments of the forward of ``batch``."""
        return {**(self.collate(batch) if self.collate else batch), **self.options}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Output of a training run."""

    checkpoints: Path | None = None
    """The folder for ``--resume``; None: nothing is saved."""
    resume: bool = False
    """Continue with the run that is there."""
    save_model: Callable[[nn.Module], Path] | None = None
    """Writes the trained model, on all ranks, and returns its path."""


@dataclasses.dataclass(kw_only=True)
class Run:
    """Results of a training run; its module is an ordinary one again."""

    module: nn.Module
    report: dict
    """``model.report()`` at the end."""
    scores: list[Score]
    """Scores of every step's training batch, over all ranks."""
    evaluations: dict[int, Score]
    """Held-out scores by the number of steps before them."""
    test: Score | None
    tokens_per_second: float
    """Rate of all ranks."""

    @property
    def final(self) -> Score:
        """The last held-out score."""
        return self.evaluations[max(self.evaluations)]


@dataclasses.dataclass(kw_only=True)
class Progress:
    """The progress of a run, stored in a checkpoint."""

    scores: list[Score] = dataclasses.field(default_factory=list)
    evaluations: dict[int, Score] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    """Seconds spent in steps."""
    num_tokens: int = 0
    """Tokens of this rank."""

    @property
    def num_steps(self) -> int:
        """Steps made so far."""
        return len(self.scores)

    def as_state(self) -> dict[str, Any]:
        """The progress in a checkpoint's types."""
        return {
            "scores": [dataclasses.astuple(score) for score in self.scores],
            "evaluations": [(step, *dataclasses.astuple(score)) for step, score in self.evaluations.items()],
            "seconds": self.seconds,
            "num_tokens": self.num_tokens,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Progress:
        """Inverse of :meth:`as_state`."""
        return cls(
            scores=[Score(*values) for values in state["scores"]],
            evaluations={step: Score(*values) for step, *values in state["evaluations"]},
            seconds=state["seconds"],
            num_tokens=state["num_tokens"],
        )

"""Rows of examples as tensors: batches of them, shares of ranks, and how well answers fit them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator

import torch
from ranks import Ranks
from torch.utils.data import DistributedSampler

IGNORED = -100
"""The label that transformers leaves out of a loss."""

Batch = dict[str, torch.Tensor]
"""Tensors whose first dimension is the example, by the model's argument names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """In which order a run sees its rows, and how many at a time."""

    batch_size: int
    """Rows per forward and rank."""
    seed: int
    """Of the order."""


@dataclasses.dataclass(frozen=True)
class Score:
    """A loss (nats) and an accuracy (0 to 1), each the mean over the labels that count."""

    loss: float
    accuracy: float


def num_rows(data: Batch) -> int:
    """The number of examples."""
    return len(data["input_ids"])


def count_tokens(data: Batch) -> int:
    """The number of tokens, padding left out."""
    return int(data["attention_mask"].sum()) if "attention_mask" in data else data["input_ids"].numel()


def fingerprint(data: Batch) -> str:
    """A hash of all values, for telling whether a run goes on with the data that it began with."""
    digest = hashlib.sha256()
    for name, values in sorted(data.items()):
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        digest.update(values.contiguous().numpy())
    return digest.hexdigest()[:16]


def endless_batches(
    train: Batch, prepare: Callable[[Batch, torch.Generator], Batch] | None, order: Order, ranks: Ranks
) -> Iterator[Batch]:
    """This rank's training batches of one size, in a seeded order that is another one in each epoch.

    The ranks' n-th batches together are the n-th batch of one rank with batches as large as all of theirs. ``prepare``
    makes a batch of rows of ``train``.
    """
    rows = range(num_rows(train))
    share = DistributedSampler(
        rows, num_replicas=ranks.size, rank=ranks.rank, seed=order.seed, drop_last=ranks.size > 1
    )
    generator = torch.Generator().manual_seed(order.seed + ranks.rank)
    for epoch in itertools.count():
        share.set_epoch(epoch)
        shuffled = torch.tensor(list(share))
        for start in range(0, len(shuffled) - order.batch_size + 1, order.batch_size):
            chosen = shuffled[start : start + order.batch_size]
            batch = {name: values[chosen] for name, values in train.items()}
            yield prepare(batch, generator) if prepare else batch


def share_of(data: Batch, ranks: Ranks) -> Batch:
    """Every ``ranks.size``-th row. All shares have as many rows; labels of those that fill up do not count."""
    rows = torch.arange(ranks.rank, ranks.rank + -(-num_rows(data) // ranks.size) * ranks.size, ranks.size)
    share = {name: values[rows.clamp(max=num_rows(data) - 1)] for name, values in data.items()}
    share["labels"][rows >= num_rows(data)] = IGNORED
    return share


def unigram_score(train_labels: torch.Tensor, labels: torch.Tensor) -> Score:
    """The score on ``labels`` of always predicting the frequencies in ``train_labels``, each counted once more."""
    train_labels, labels = (values[values != IGNORED].long() for values in (train_labels, labels))
    num_classes = int(max(train_labels.max(), labels.max())) + 1
    counts = torch.bincount(train_labels, minlength=num_classes).double() + 1
    loss = -(counts / counts.sum()).log()[labels].mean()
    return Score(loss.item(), (labels == counts.argmax()).double().mean().item())


def count_labels(labels: torch.Tensor, shift: bool) -> int:
    """How many labels count; with ``shift`` those of the first position do not."""
    return int(((labels[:, 1:] if shift else labels) != IGNORED).sum())


def count_correct(logits: torch.Tensor, labels: torch.Tensor, shift: bool) -> torch.Tensor:
    """How many labels the largest logits hit."""
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return (logits.argmax(-1) == labels.to(logits.device)).sum()

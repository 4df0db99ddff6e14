"""Rows of examples as tensors: batches, shares of ranks, and scores of answers."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import DistributedSampler

from patrickstar.finetune.ranks import Ranks
from patrickstar.sequence.sharded_labels import IGNORED

Batch = dict[str, torch.Tensor]
"""Tensors whose first dimension is the example, by the model's argument names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """Order and batch size of a run's rows."""

    batch_size: int
    """Rows per forward and rank."""
    seed: int
    """Seed of the order."""


@dataclasses.dataclass(frozen=True)
class Score:
    """A loss (nats) and an accuracy (0 to 1), each the mean over the labels that count."""

    loss: float
    accuracy: float


def num_rows(data: Batch) -> int:
    """The number of examples."""
    return len(data["input_ids"])


def count_tokens(data: Batch) -> int:
    """The number of tokens without padding."""
    return int(data["attention_mask"].sum()) if "attention_mask" in data else data["input_ids"].numel()


def fingerprint(data: Batch) -> str:
    """A hash of all values, to check that a resumed run has the same data."""
    digest = hashlib.sha256()
    for name, values in sorted(data.items()):
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        digest.update(values.contiguous().numpy())
    return digest.hexdigest()[:16]


def endless_batches(
    train: Batch, prepare: Callable[[Batch, torch.Generator], Batch] | None, order: Order, ranks: Ranks
) -> Iterator[Batch]:
    """This rank's training batches of one size, in a seeded order that differs between epochs.

    The ranks' n-th batches together are the n-th batch of a single rank with batches as large as all of theirs.
    ``prepare`` makes a batch from rows of ``train``.
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
    """Every ``ranks.size``-th row. All shares are padded to equally many rows; labels of padding do not count."""
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
    """Number of labels that count; with ``shift`` those of the first position do not."""
    return int(((labels[:, 1:] if shift else labels) != IGNORED).sum())


def count_correct(logits: torch.Tensor, labels: torch.Tensor, shift: bool) -> torch.Tensor:
    """Number of labels that the largest logits predict."""
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return (logits.argmax(-1) == labels.to(logits.device)).sum()

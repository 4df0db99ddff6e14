"""The data loader that ``patrickstar.initialize`` makes from ``training_data``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from patrickstar.ranks.distributed import RankGroups


def make_loader(
    dataset: Any,
    ranks: RankGroups,
    *,
    batch_size: int,
    drop_last: bool,
    ranks_per_sample: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> DataLoader[Any]:
    """A loader of this rank's micro-batches, in a random order common to all ranks. ``loader.sampler.set_epoch(n)``
    changes it.

    Args:
        dataset: of ``torch.utils.data``; each rank iterates an ``IterableDataset`` itself.
        ranks: the ranks that share the samples.
        batch_size: samples of a micro-batch.
        drop_last: drop a last batch that is not full.
        ranks_per_sample: so many neighbouring ranks get the same samples.
        collate_fn: makes a batch from samples; None: PyTorch's.

    Raises:
        ValueError: ``dataset`` is no dataset.
    """
    options: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last, "collate_fn": collate_fn}
    options["pin_memory"] = torch.cuda.is_available()
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, **options)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ValueError(
            f"training_data is a {type(dataset).__name__}; give a dataset of torch.utils.data (with __getitem__ and "
            "__len__, or an IterableDataset)"
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset,
        num_replicas=len(ranks.members) // ranks_per_sample,
        rank=ranks.members.index(ranks.context.rank) // ranks_per_sample,
    )
    return DataLoader(dataset, sampler=sampler, **options)

"""A run to be written in another program's format: whole tensors, and the training state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from patrickstar.checkpoint.errors import CheckpointError
from patrickstar.checkpoint.shards import STATE_KINDS, Kind, TensorShard
from patrickstar.checkpoint.training_state import TrainingState

ADAM_KINDS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")
_ADAMS = ("Adam", "AdamW")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """See the module's docstring."""

    shards: Sequence[TensorShard]
    """Whole tensors, row-major. A writer reads each once, in this order; a result is valid until the next read."""
    state: TrainingState

    @property
    def values(self) -> list[TensorShard]:
        """Parameters and buffers."""
        return [shard for shard in self.shards if shard.kind not in STATE_KINDS]

    @property
    def group_of(self) -> dict[str, int]:
        """Index of each trained parameter's group."""
        trained = {shard.name for shard in self.values if shard.kind in ("master", "managed")}
        groups = enumerate(self.state.groups)
        return {name: index for index, group in groups for name in group["params"] if name in trained}

    @property
    def without_states(self) -> list[TensorShard]:
        """Trained parameters that were never updated."""
        trained, counts = self.group_of, self.state.step_counts
        return [shard for shard in self.values if shard.name in trained and shard.name not in counts]

    def check(self) -> None:
        """Raises CheckpointError unless the optimizer is Adam or AdamW."""
        others = {shard.kind for shard in self.shards} & set(STATE_KINDS) - set(ADAM_KINDS)
        if others or self.state.optimizer not in (None, *_ADAMS):
            raise CheckpointError(
                f"the run is of {self.state.optimizer or ', '.join(others)}, and runs of {' and '.join(_ADAMS)} are "
                "exported: export the weights, or merge the checkpoint"
            )


def whole(shard: TensorShard) -> torch.Tensor:
    """The shard's values in its shape."""
    return shard.read().view(shard.shape)

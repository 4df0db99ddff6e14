"""The section ``tensor_parallel``: this engine's keys, and those of DeepSpeed's automatic tensor parallelism."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from patrickstar.choices import MatrixMode
from patrickstar.config.fates import HONOURED, mapped
from patrickstar.config.other_keys import with_other_keys
from patrickstar.config.values import AtLeast0, AtLeast1, Section


class InnerTensorParallelConfig(with_other_keys("tensor_parallel.tp"), Section):
    """The section ``tensor_parallel.tp``: sizes and groups of DeepSpeed's tensor parallelism."""

    tp_size: Annotated[
        AtLeast1, mapped("tensor_parallel.columns", "layers are sharded over a mesh of one row and so many columns")
    ] = 1
    """Ranks over which each layer is sharded."""


class TensorParallelConfig(with_other_keys("tensor_parallel"), Section):
    """The section ``tensor_parallel``: each rank has a block of the same matrices."""

    rows: Annotated[AtLeast1, HONOURED] = 1
    """Rows of the mesh over which parameters and activations are sharded. Rows shard samples: each computes some of a
    batch.
    """
    columns: Annotated[AtLeast1, HONOURED] = 1
    """Columns of that mesh; they shard features and heads. ``rows`` times ``columns`` divides the number of all ranks;
    the others have other samples, or other tokens of the same ones (``sequence_parallel``).
    """
    mode: Annotated[MatrixMode, HONOURED] = MatrixMode.TWO
    """``"2d"``: blocks, with panels of activations and weights sent; for all models that can be sharded, and sequences
    of any length. ``"1d"``: pairs of layers, sharded by columns and by rows, with sequence parallelism between them, as
    in Megatron; only activations are sent, ``rows`` is 1, and ``columns`` divides sequences. ``"auto"``: the one that
    sends less, by count, for the micro-batch size times the model's positions; 2D if either is unknown. The log says
    which, and why.
    """
    autotp_size: Annotated[
        AtLeast0,
        mapped("tensor_parallel.columns", "layers are sharded over a mesh of one row and so many columns; 0 is 1"),
    ] = 0
    """Ranks over which each layer is sharded; 0: tensor parallelism is off."""
    tp: InnerTensorParallelConfig = Field(default_factory=InnerTensorParallelConfig)
    """Sizes and groups of tensor parallelism."""

    @property
    def num_ranks(self) -> int:
        """Ranks that share each matrix."""
        return self.rows * self.columns

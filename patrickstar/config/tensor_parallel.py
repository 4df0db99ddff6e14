"""The section ``tensor_parallel``: this engine's keys, and those of DeepSpeed's automatic tensor parallelism."""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import Field

from patrickstar.config.fates import HONOURED, mapped
from patrickstar.config.other_keys import with_other_keys
from patrickstar.config.values import AtLeast0, AtLeast1, Section


class MatrixMode(enum.Enum):
    """How matrices are divided (:class:`patrickstar.tensor2d.cost.Mode`)."""

    TWO = "2d"
    ONE = "1d"
    AUTO = "auto"


class InnerTensorParallelConfig(with_other_keys("tensor_parallel.tp"), Section):
    """The section ``tensor_parallel.tp``: sizes and groups of DeepSpeed's tensor parallelism."""

    tp_size: Annotated[
        AtLeast1, mapped("tensor_parallel.columns", "layers are divided over a mesh of one row and so many columns")
    ] = 1
    """Number of ranks that each layer is divided over."""


class TensorParallelConfig(with_other_keys("tensor_parallel"), Section):
    """The section ``tensor_parallel``: ranks that have a block each of the same matrices."""

    rows: Annotated[AtLeast1, HONOURED] = 1
    """Rows of the mesh that parameters and activations are divided over. Rows divide samples: each of them computes
    some of a batch.
    """
    columns: Annotated[AtLeast1, HONOURED] = 1
    """Columns of that mesh; they divide features and heads. ``rows`` times ``columns`` divides the number of all ranks;
    the others have other samples, or other tokens of the same ones (``sequence_parallel``).
    """
    mode: Annotated[MatrixMode, HONOURED] = MatrixMode.TWO
    """``"2d"``: into blocks, which panels of activations and weights are sent of; of all models that there are plans
    for, with sequences of any length. ``"1d"``: in pairs of layers, by columns and by rows, with sequences sharded
    between them, as Megatron does; only activations are sent, ``rows`` is 1, and ``columns`` divides sequences.
    ``"auto"``: the one of both that sends less for the micro-batch size times the model's positions, as counted; two
    dimensions where one of these is not known. The log says which, and why.
    """
    autotp_size: Annotated[
        AtLeast0,
        mapped("tensor_parallel.columns", "layers are divided over a mesh of one row and so many columns; 0 is 1"),
    ] = 0
    """Number of ranks that each layer is divided over; 0: tensor parallelism is off."""
    tp: InnerTensorParallelConfig = Field(default_factory=InnerTensorParallelConfig)
    """Sizes and groups of tensor parallelism."""

    @property
    def num_ranks(self) -> int:
        """Those that share each matrix."""
        return self.rows * self.columns

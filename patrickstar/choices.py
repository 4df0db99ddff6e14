"""Values of configuration keys and flags that are names. Standard library only."""

from __future__ import annotations

import enum


class OptimizerType(enum.Enum):
    """The update rule; Adam and AdamW differ in where weight decay is applied."""

    ADAM = "Adam"
    ADAMW = "AdamW"
    LION = "Lion"
    SGD = "SGD"


class Speculation(enum.Enum):
    """The time at which updates on the host start."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"
    COMMIT = "commit"


class States(enum.Enum):
    """Types in which momentum and variance are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    EIGHT_BIT = "8bit"


class Master(enum.Enum):
    """Values from which a 16-bit parameter is updated."""

    EXACT = "exact"
    STOCHASTIC = "stochastic"


class RankReduction(enum.Enum):
    """Reduction of the ranks' gradients."""

    MEAN = "mean"
    SUM = "sum"


class SequenceMode(enum.Enum):
    """Context-parallel attention modes (:class:`patrickstar.sequence.Mode`)."""

    AUTO = "auto"
    RING = "ring"
    ZIGZAG = "zigzag"
    ULYSSES = "ulysses"
    HYBRID = "hybrid"
    RSA = "rsa"


class ExpertsComputation(enum.Enum):
    """Computation between the grouped products of experts (``patrickstar.module.fused_experts``)."""

    FUSED = "fused"
    MODEL = "model"


class Fp8Recipe(enum.Enum):
    """Blocks of elements that share a scale in products of 8 bits (``patrickstar.fp8.linear``)."""

    BLOCK = "block"
    ROWWISE = "rowwise"
    TENSORWISE = "tensorwise"


class LossComputation(enum.Enum):
    """How much of a language model's logits exists at a time."""

    WHOLE = "whole"
    FUSED = "fused"


class ActivationOffload(enum.Enum):
    """Models whose activations may be offloaded between forward and backward."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


class Recompute(enum.Enum):
    """Recomputation of checkpointed calls."""

    AUTO = "auto"
    ALWAYS = "always"


class KeepAttention(enum.Enum):
    """Selective recomputation: keeps attention's outputs in checkpointed layers for their backward."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


class DiskIo(enum.Enum):
    """The interface for disk transfers."""

    AUTO = "auto"
    IO_URING = "io_uring"
    THREADS = "threads"


class HostAffinity(enum.Enum):
    """CPU affinity of the threads that compute on the host."""

    AUTO = "auto"
    PINNED = "pinned"
    FREE = "free"


class QuantizationType(enum.Enum):
    """Storage formats of frozen weights."""

    NF4 = "nf4"
    INT8 = "int8"


class MatrixMode(enum.Enum):
    """Dimensions of tensor parallelism (:class:`patrickstar.tensor2d.cost.Mode`)."""

    TWO = "2d"
    ONE = "1d"
    AUTO = "auto"

"""The configuration: a dict or a JSON file from the user, validated into immutable models.

``parse_config`` returns a :class:`Config`; later code sees no dict. The models are the only schema: each key's type,
default, meaning and fate (``fates``) stand together. docs/config.md and the JSON Schema (``python -m
patrickstar.config``) are generated from them. Keys without effect, and refused keys, are rows of a table,
other_keys.md, that completes the models.
"""

from patrickstar.choices import (
    ActivationOffload,
    DiskIo,
    ExpertsComputation,
    Fp8Recipe,
    HostAffinity,
    KeepAttention,
    LossComputation,
    Master,
    MatrixMode,
    OptimizerType,
    QuantizationType,
    RankReduction,
    Recompute,
    SequenceMode,
    Speculation,
    States,
)
from patrickstar.config.batch_sizes import BatchSizes, resolve_batch_sizes
from patrickstar.config.checks import check_loss_scaler_state, make_loss_scaler
from patrickstar.config.dialects import Dialect
from patrickstar.config.expert_parallel import ExpertParallelConfig
from patrickstar.config.fp8 import Fp8Config
from patrickstar.config.optimizer import OptimizerConfig, OptimizerParams, nearest_optimizer
from patrickstar.config.parsing import log_accepted_options, parse_config
from patrickstar.config.quantization import QuantizationConfig
from patrickstar.config.root import Config
from patrickstar.config.schema import (
    PROFILE_VARIABLE,
    ActivationsConfig,
    Bf16Config,
    ClientConfig,
    DelaysConfig,
    DiskMemoryConfig,
    Fp16Config,
    HostThreadsConfig,
    MemTracerConfig,
    OptsConfig,
    ProfileConfig,
    SequenceParallelConfig,
    profile_of_environment,
)
from patrickstar.config.spellings import auto_keys, fill_auto
from patrickstar.config.update_rules import ALL_OPTIONS, UpdateRule, group_options, rule_of
from patrickstar.config.values import parse_bytes

__all__ = [
    "ALL_OPTIONS",
    "PROFILE_VARIABLE",
    "ActivationOffload",
    "ActivationsConfig",
    "BatchSizes",
    "Bf16Config",
    "ClientConfig",
    "Config",
    "DelaysConfig",
    "Dialect",
    "DiskIo",
    "DiskMemoryConfig",
    "Fp16Config",
    "Fp8Config",
    "Fp8Recipe",
    "HostAffinity",
    "HostThreadsConfig",
    "KeepAttention",
    "ExpertParallelConfig",
    "ExpertsComputation",
    "LossComputation",
    "Master",
    "MatrixMode",
    "MemTracerConfig",
    "OptimizerConfig",
    "OptimizerParams",
    "OptimizerType",
    "OptsConfig",
    "ProfileConfig",
    "QuantizationConfig",
    "QuantizationType",
    "RankReduction",
    "Recompute",
    "SequenceMode",
    "SequenceParallelConfig",
    "Speculation",
    "States",
    "UpdateRule",
    "auto_keys",
    "check_loss_scaler_state",
    "fill_auto",
    "group_options",
    "log_accepted_options",
    "make_loss_scaler",
    "nearest_optimizer",
    "parse_bytes",
    "parse_config",
    "profile_of_environment",
    "resolve_batch_sizes",
    "rule_of",
]

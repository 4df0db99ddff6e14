"""The configuration: a dict or a JSON file as users write it, checked and turned into immutable models.

``parse_config`` turns it into a :class:`Config`; nothing past it sees a dict. The models are the one schema: each key's
type, default, meaning and what happens to it (``fates``) stand together, and docs/config.md and the JSON Schema
(``python -m patrickstar.config``) are made from them. Keys that have no effect or are refused are rows of a table,
other_keys.md, which the models are completed from.
"""

from patrickstar.config.batch_sizes import BatchSizes, resolve_batch_sizes
from patrickstar.config.checks import check_loss_scaler_state, make_loss_scaler
from patrickstar.config.dialects import Dialect
from patrickstar.config.optimizer import (
    Master,
    OptimizerConfig,
    OptimizerParams,
    OptimizerType,
    Speculation,
    States,
)
from patrickstar.config.parsing import log_accepted_options, parse_config
from patrickstar.config.quantization import QuantizationConfig, QuantizationType
from patrickstar.config.root import Config
from patrickstar.config.schema import (
    PROFILE_VARIABLE,
    ActivationOffload,
    ActivationsConfig,
    Bf16Config,
    ClientConfig,
    DelaysConfig,
    DiskIo,
    DiskMemoryConfig,
    Fp16Config,
    HostAffinity,
    HostThreadsConfig,
    KeepAttention,
    LossComputation,
    MemTracerConfig,
    OptsConfig,
    ProfileConfig,
    RankReduction,
    SequenceMode,
    SequenceParallelConfig,
    profile_of_environment,
)
from patrickstar.config.spellings import auto_keys, fill_auto
from patrickstar.config.tensor_parallel import MatrixMode
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
    "HostAffinity",
    "HostThreadsConfig",
    "KeepAttention",
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
    "parse_bytes",
    "parse_config",
    "profile_of_environment",
    "resolve_batch_sizes",
    "rule_of",
]

"""The configuration: a dict as users write it, checked and turned into frozen dataclasses.

``parse_config`` turns the dict into a :class:`Config`; nothing past it sees a dict.
"""

from patrickstar.config.checks import check_adam_options, make_loss_scaler
from patrickstar.config.parsing import log_accepted_options, parse_bytes, parse_config
from patrickstar.config.schema import (
    PROFILE_VARIABLE,
    AdamConfig,
    Bf16Config,
    ClientConfig,
    Config,
    DelaysConfig,
    Fp16Config,
    HostAffinity,
    HostThreadsConfig,
    MemTracerConfig,
    OptimizerConfig,
    OptimizerType,
    OptsConfig,
    ProfileConfig,
    Speculation,
    Streaming,
    profile_of_environment,
)

__all__ = [
    "PROFILE_VARIABLE",
    "AdamConfig",
    "Bf16Config",
    "ClientConfig",
    "Config",
    "DelaysConfig",
    "Fp16Config",
    "HostAffinity",
    "HostThreadsConfig",
    "MemTracerConfig",
    "OptimizerConfig",
    "OptimizerType",
    "OptsConfig",
    "ProfileConfig",
    "Speculation",
    "Streaming",
    "check_adam_options",
    "log_accepted_options",
    "make_loss_scaler",
    "parse_bytes",
    "parse_config",
    "profile_of_environment",
]

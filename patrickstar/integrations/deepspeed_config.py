"""DeepSpeed's configuration where transformers or Accelerate would give it to DeepSpeed.

The sources are ``TrainingArguments(deepspeed=...)``, an ``accelerate.DeepSpeedPlugin``, and the environment variables
of ``accelerate launch``. An engine takes the configuration instead: DeepSpeed need not be installed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.utils import DeepSpeedPlugin

from patrickstar.config import Config, Dialect, parse_config
from patrickstar.config.dialects import DEEPSPEED_DEFAULTS
from patrickstar.config.keys import keys_of
from patrickstar.config.parsing import keys_for_initialize
from patrickstar.config.spellings import AUTO
from patrickstar.integrations.decided_config import TRAINER_KEYS, of_engine, own_config

logger = logging.getLogger("patrickstar")

_SWITCH = "ACCELERATE_USE_DEEPSPEED"  # set by `accelerate launch`


def launched_plugin() -> DeepSpeedPlugin | None:
    """The plugin that ``accelerate launch`` describes; None if it starts no DeepSpeed."""
    return DeepSpeedPlugin() if os.environ.get(_SWITCH, "").lower() in ("true", "1") else None


@contextlib.contextmanager
def without_launched_deepspeed() -> Iterator[None]:
    """Context in which Accelerate and transformers do not start DeepSpeed by the environment."""
    before = os.environ.pop(_SWITCH, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[_SWITCH] = before


def config_of_plugin(plugin: Any) -> dict[str, Any]:
    """The configuration of a ``DeepSpeedPlugin``, or of several of which one is selected by its name."""
    plugins = list(plugin.values()) if isinstance(plugin, Mapping) else [plugin]
    if len(plugins) > 1:
        raise ValueError(
            f"the accelerator has {len(plugins)} DeepSpeed plugins ({', '.join(plugin)}), and an engine has one "
            "configuration; give one of them, and the other models to an Accelerator each"
        )
    # Accelerate sets steps_per_print, for DeepSpeed to be silent.
    return {name: value for name, value in plugins[0].deepspeed_config.items() if name != "steps_per_print"}


def for_trainer(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """DeepSpeed's configuration, a dict or a file, as a Trainer's ``patrickstar_config``. Values of ``"auto"`` remain.

    Raises:
        ValueError: it is not valid.
    """
    if not config:
        return {}
    given = own_config(config)
    parsed = parse_config(given, Dialect.DEEPSPEED)
    values = {name: value for name, value in given.items() if name in Config.model_fields}
    for name in ("bf16", "fp16"):
        if isinstance(values.get(name), dict):
            values[name].setdefault("enabled", False)
    if values.get("optimizer"):
        values["optimizer"]["type"] = parsed.optimizer.type.value
    return values


def pop_loop_config(arguments: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Takes the DeepSpeed plugin out of an Accelerator's arguments, or takes that of ``accelerate launch``. Returns its
    configuration for the script's own loop, and its ``gradient_accumulation_steps``, which win over the Accelerator's.

    Raises:
        ValueError: it is not valid.
    """
    given = [arguments.pop(name, None) for name in ("deepspeed_plugin", "deepspeed_plugins")]
    plugin = given[0] or given[1] or launched_plugin()
    if plugin is None:
        return {}, None
    values = for_trainer(config_of_plugin(plugin))
    accumulation = values.pop("gradient_accumulation_steps", AUTO)
    if values.get("gradient_clipping", AUTO) == AUTO:  # as Accelerate fills it in
        values["gradient_clipping"] = DEEPSPEED_DEFAULTS["gradient_clipping"]
    return without_loop_keys(values), None if accumulation == AUTO else int(accumulation)


def without_loop_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``config`` without the keys that a script's own loop decides, after a warning that names them."""
    left = [key.name for key in keys_for_initialize(config) if config[key.name] != AUTO]
    left += [key for key in TRAINER_KEYS if key in config]
    if left:
        logger.warning("left to the script's own loop, and not taken from the configuration: %s", ", ".join(left))
    of_loop = {key.name for key in keys_of() if key.reader is not None}
    return {name: value for name, value in of_engine(config).items() if name not in of_loop}

"""The command-line arguments of a DeepSpeed script."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

CONFIG_ARGUMENTS = ("patrickstar_config", "deepspeed_config", "deepscale_config")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--deepspeed``, ``--deepspeed_config PATH`` and its alias ``--patrickstar_config PATH`` to ``parser`` and
    returns it. ``patrickstar.initialize(args=...)`` reads them.
    """
    group = parser.add_argument_group("PatrickStar", "options of the engine")
    group.add_argument("--deepspeed", action="store_true", default=False, help="accepted; the script decides")
    for name in ("deepspeed_config", "patrickstar_config"):
        group.add_argument(
            f"--{name}", type=str, default=None, metavar="PATH", help="a JSON file with the configuration"
        )
    return parser


def choose_config(args: Any, config: Any, config_params: Any) -> Mapping[str, Any] | str | os.PathLike[str]:
    """The one configuration that ``initialize`` was given.

    Raises:
        ValueError: there is none, or more than one.
    """
    given = {"config": config, "config_params": config_params}
    given |= {f"args.{name}": getattr(args, name, None) for name in CONFIG_ARGUMENTS}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        raise ValueError(
            "initialize got no configuration; pass config= (a dict or the path of a JSON file), or args with "
            "--deepspeed_config (add_config_arguments adds it)"
        )
    if len(given) > 1:
        raise ValueError(f"initialize got several configurations, in {' and '.join(given)}; pass one of them")
    return next(iter(given.values()))

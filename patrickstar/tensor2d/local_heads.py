"""Modules that attend with this rank's heads: the numbers by which their code cuts queries, keys and values."""

from __future__ import annotations

from typing import Any

from torch import nn

from patrickstar.tensor2d.attention import heads_here
from patrickstar.tensor2d.group import MeshPlace
from patrickstar.tensor2d.panels import Cut
from patrickstar.tensor2d.structure import Attention

_SIZES = ("dim", "size")
"""Words in names of attributes that are numbers of features."""


class LocalConfig:
    """A configuration with other values of some keys. All others are those of ``config``, also after it changes."""

    def __init__(self, config: Any, values: dict[str, int]):
        self._config = config
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # while a copy is made
            raise AttributeError(name)
        return getattr(self._config, name)


def check_heads(model: nn.Module, attention: Attention, place: MeshPlace, by: Cut) -> None:
    """Raises ValueError unless rows or columns (``by``) divide the heads, and those of keys and values."""
    what = f"{type(model).__name__}: {attention.name}: attention"
    heads_here(attention.heads, attention.key_heads, place, by, what)


def keep_local_heads(module: Any, attention: Attention, ranks: int) -> None:
    """Divides the numbers of heads, and of the features of all heads, in ``module`` by ``ranks``.

    These are attributes of the module and the two numbers in its configuration. Attributes are told apart by value, and
    numbers of heads from numbers of features by name: a head may have as many features as there are heads.
    """
    heads = {attention.heads, attention.key_heads}
    widths = {number * attention.head_dim for number in heads} - {attention.head_dim}
    for name, value in list(vars(module).items()):
        is_size = any(word in name for word in _SIZES)
        if type(value) is int and value in (widths if is_size else heads if "head" in name else ()):
            setattr(module, name, value // ranks)
    config = getattr(module, "config", None)
    if config is not None:
        renamed = getattr(config, "attribute_map", {})
        values = {"num_attention_heads": attention.heads // ranks, "num_key_value_heads": attention.key_heads // ranks}
        module.config = LocalConfig(config, values | {renamed[key]: n for key, n in values.items() if key in renamed})

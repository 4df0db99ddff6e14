"""Linear layers of a model that may be computed or stored in fewer bits than others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

_HEAD = "lm_head"


@dataclasses.dataclass(frozen=True)
class LinearLayer:
    """A linear layer with a weight of two dimensions."""

    name: str
    module: nn.Module
    exclusion: str | None
    """Reason why it keeps the compute dtype, as a noun; None: there is none."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight."""
        return tuple(self.module._parameters["weight"].shape)


def linear_layers(module: nn.Module, skipped: Iterable[str], key: str) -> Iterator[LinearLayer]:
    """The linear layers of ``module``. Excluded are output embeddings, weights tied to an embedding, modules named
    ``lm_head``, PEFT's adapters, and ``skipped``.

    Args:
        skipped: names of modules, or runs of their parts between dots.
        key: configuration key of ``skipped``, for the error.

    Raises:
        ValueError: ``skipped`` names none of the modules.
    """
    skipped = tuple(skipped)
    names = [name for name, _ in module.named_modules() if name]
    for unknown in (text for text in skipped if not any(is_named(name, text) for name in names)):
        raise ValueError(
            f"{key} names {unknown!r}, which is no module of {type(module).__name__}, nor a part of a name between "
            "dots; named_modules() lists them"
        )
    tied, heads = _embeddings(module), _output_embeddings(module)
    for name, child in module.named_modules():
        weight = child._parameters.get("weight")
        if weight is None or weight.dim() != 2 or not _is_linear(child):
            continue
        exclusion = None
        if weight in heads or is_named(name, _HEAD):
            exclusion = "output embedding"
        elif weight in tied:
            exclusion = "weight of an embedding"
        elif any(is_named(name, text) for text in skipped):
            exclusion = key
        elif _is_adapter(module, name):
            exclusion = "adapter"
        yield LinearLayer(name, child, exclusion)


def is_named(name: str, skipped: str) -> bool:
    """Tests whether ``skipped`` is the module's name or a run of its dotted parts."""
    return f".{skipped}." in f".{name}."


def _is_linear(module: nn.Module) -> bool:
    """Includes transformers' ``Conv1D``, GPT-2's linear layer."""
    return isinstance(module, nn.Linear) or (
        type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    )


def _embeddings(module: nn.Module) -> set[Any]:
    return {child.weight for child in module.modules() if isinstance(child, (nn.Embedding, nn.EmbeddingBag))}


def _output_embeddings(module: nn.Module) -> set[Any]:
    heads = set()
    for child in module.modules():
        getter = getattr(child, "get_output_embeddings", None)
        if not callable(getter):
            continue
        try:
            heads.add(getattr(getter(), "weight", None))
        except (AttributeError, NotImplementedError):  # a model without output embeddings
            continue
    return heads - {None}


def _is_adapter(module: nn.Module, name: str) -> bool:
    """Tests whether ``name`` belongs to a PEFT adapter: inside an adapted layer, only ``base_layer`` does not."""
    parts = name.split(".") if name else []
    for index in range(len(parts)):
        parent = module.get_submodule(".".join(parts[:index]))
        if isinstance(getattr(parent, "base_layer", None), nn.Module) and parts[index] != "base_layer":
            return True
    return False

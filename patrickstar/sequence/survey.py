"""Survey of a Hugging Face model before its sequences are sharded, made by calling a small copy.

survey = survey_model(model, batch)     # of a copy of some of its layers, with whole sequences
divided = ShardedModel(..., survey=survey)
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.sequence.positions import Numbering, Positions, find_positions
from patrickstar.sequence.recurrent_layers import recurrent_layers
from patrickstar.sequence.sharded_attention import ATTENTION, noting_layers, register_attention

TOKEN_WISE = ("mlp", "moe")
"""Layer types of configurations without attention; such a layer may have the name of one with attention."""
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Survey:
    """Findings about one model.

    Attributes:
        attending: modules that compute attention through transformers, by their :func:`without_numbers` names; empty if
            unknown.
        positions: the numbering of tokens.
    """

    attending: frozenset[str] = frozenset()
    positions: Positions = dataclasses.field(default_factory=Positions)

    def to_json(self) -> str:
        """Serialises for other ranks; see :meth:`from_json`."""
        positions = dataclasses.asdict(self.positions) | {"numbering": self.positions.numbering.name}
        return json.dumps({"attending": sorted(self.attending), "positions": positions})

    @classmethod
    def from_json(cls, text: str) -> Survey:
        """Parses :meth:`to_json`; raises ValueError, KeyError or TypeError for other text."""
        told = json.loads(text)
        positions = dict(told["positions"])
        numbering, inside = Numbering[positions.pop("numbering")], tuple(positions.pop("inside"))
        return cls(frozenset(told["attending"]), Positions(numbering=numbering, inside=inside, **positions))

    def attending_modules(self, model: nn.Module) -> dict[int, str]:
        """Attention modules in all layers but :data:`TOKEN_WISE` ones: error names, by id."""
        config = getattr(model, "config", None)
        kinds = getattr(config and config.get_text_config(), "layer_types", None) or ()
        token_wise = {str(index) for index, kind in enumerate(kinds) if kind in TOKEN_WISE}
        return {
            id(module): f"{name} ({type(module).__name__})"
            for name, module in model.named_modules()
            if without_numbers(name) in self.attending and token_wise.isdisjoint(name.split("."))
        }


def check_reached(model: nn.Module, attending: Mapping[int, str], reached: set[int]) -> None:
    """Raises ValueError, naming layers, unless all attention was computed over the sharded sequence.

    Args:
        model: a model after a context-parallel call.
        attending: the result of :meth:`Survey.attending_modules`.
        reached: ids of the modules whose attention was context-parallel.
    """
    missing = [name for module, name in attending.items() if module not in reached]
    if missing or not reached:
        raise ValueError(
            f"attention of {_some(missing) or type(model).__name__} was not computed over the whole sequence, which "
            f"ranks share: {type(model).__name__} does not ask transformers for it in this call; leave "
            "sequence_parallel out"
        )


def survey_model(model: nn.Module, batch: Mapping[str, Any]) -> Survey:
    """Calls ``model`` with the whole sequences of ``batch``.

    Args:
        model: with values, on the CPU; it may have some of the layers. Its attention implementation is changed.
        batch: ``input_ids`` with padding tokens within sequences, and an ``attention_mask``.

    Raises:
        ValueError: no layer uses transformers' attention interface, the numbering of tokens is unknown, or the model
            has no output per token.
    """
    register_attention()
    model.set_attn_implementation(ATTENTION)

    def call(arguments: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            output = output_of(model(**arguments))
        if output.shape[:2] != batch["input_ids"].shape:
            raise ValueError(
                f"{type(model).__name__} computes nothing for each token: of {list(batch['input_ids'].shape)} tokens "
                f"it gives {list(output.shape)}, so that no rank can compute its own part; leave sequence_parallel out"
            )
        return output

    with noting_layers() as reached:
        positions = find_positions(model, call, batch)
    names = frozenset(without_numbers(name) for name, module in model.named_modules() if id(module) in reached)
    if not names and not recurrent_layers(model):
        raise ValueError(
            f"no layer of {type(model).__name__} asks transformers for its attention, so its sequences cannot be "
            "divided; leave sequence_parallel out, or write the model with patrickstar.sequence.attention"
        )
    return Survey(names, positions)


def output_of(output: Any) -> torch.Tensor:
    """The output per token: logits or hidden states."""
    for name in ("logits", "last_hidden_state"):
        found = getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found
    values: Iterable[Any] = output.values() if isinstance(output, Mapping) else output
    return next(value for value in values if isinstance(value, torch.Tensor) and value.dim() > 1)


def without_numbers(name: str) -> str:
    """A module name with layer numbers replaced, equal for one place in all layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

"""The survey of a model of Hugging Face before ranks share its sequences, made by calling it.

survey = survey_model(model, batch)     # of a copy of some of its layers, with whole sequences
divided = DividedModel(..., survey=survey)
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from patrickstar.sequence.divided_attention import ATTENTION, noting_layers, register_attention
from patrickstar.sequence.positions import Numbering, Positions, find_positions

_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Survey:
    """Findings about one model.

    Attributes:
        attending: the modules that ask transformers for their attention, by the names that
            :func:`without_numbers` gives them; empty: not known.
        positions: the numbering of tokens.
    """

    attending: frozenset[str] = frozenset()
    positions: Positions = dataclasses.field(default_factory=Positions)

    def to_json(self) -> str:
        """A message to other ranks; see :meth:`from_json`."""
        positions = dataclasses.asdict(self.positions) | {"numbering": self.positions.numbering.name}
        return json.dumps({"attending": sorted(self.attending), "positions": positions})

    @classmethod
    def from_json(cls, text: str) -> Survey:
        """Raises ValueError, KeyError or TypeError where it is no survey."""
        told = json.loads(text)
        positions = dict(told["positions"])
        numbering, inside = Numbering[positions.pop("numbering")], tuple(positions.pop("inside"))
        return cls(frozenset(told["attending"]), Positions(numbering=numbering, inside=inside, **positions))

    def attending_modules(self, model: nn.Module) -> dict[int, str]:
        """Names for errors of the modules that attend, by id, in all layers."""
        return {
            id(module): f"{name} ({type(module).__name__})"
            for name, module in model.named_modules()
            if without_numbers(name) in self.attending
        }


def check_reached(model: nn.Module, attending: Mapping[int, str], reached: set[int]) -> None:
    """Raises ValueError, which names layers, unless all attention was computed over divided sequences.

    Args:
        model: in a divided call.
        attending: :meth:`Survey.attending_modules`.
        reached: the ids of the modules whose attention was.
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
        model: with values, on the CPU; its layers may be some of those that will be trained. Its attention
            implementation is another one afterwards.
        batch: ``input_ids`` with padding tokens within sequences, and an ``attention_mask``.

    Raises:
        ValueError: no layer asks transformers for its attention, or how it numbers tokens is not known, or it computes
            nothing for each token.
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
    if not names:
        raise ValueError(
            f"no layer of {type(model).__name__} asks transformers for its attention, so its sequences cannot be "
            "divided; leave sequence_parallel out, or write the model with patrickstar.sequence.attention"
        )
    return Survey(names, positions)


def output_of(output: Any) -> torch.Tensor:
    """The output for each token: logits, or hidden states."""
    for name in ("logits", "last_hidden_state"):
        found = getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found
    values: Iterable[Any] = output.values() if isinstance(output, Mapping) else output
    return next(value for value in values if isinstance(value, torch.Tensor) and value.dim() > 1)


def without_numbers(name: str) -> str:
    """A name that is the same for one place in all layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

"""Communication volume of a Hugging Face model's layers, and the mesh that receives least."""

from __future__ import annotations

from typing import Any

from torch import nn

from patrickstar.tensor2d.cost import Choice, LayerShape, choose
from patrickstar.tensor2d.structure import Structure, find_structure


def layer_shape(model: nn.Module) -> LayerShape:
    """Widths of the first layer of ``model``, which may be on the meta device.

    Raises:
        ValueError: the model has no form over a mesh.
    """
    return _shape(find_structure(model), model)


def choose_for(model: nn.Module, **options: Any) -> Choice:
    """:func:`~patrickstar.tensor2d.cost.choose` for a model; ``options`` are its other arguments.

    Raises:
        ValueError: the model has no form over a mesh, or no mesh divides its layers.
    """
    structure = find_structure(model)
    first = structure.attentions[0]
    return choose(_shape(structure, model), heads=first.heads, key_heads=first.key_heads, **options)


def _shape(structure: Structure, model: Any) -> LayerShape:
    """A mixture, which each rank has whole, counts as an MLP of no width."""
    attention = structure.attentions[0]
    mlps = [pair for pair in structure.mlps if pair.second.startswith(f"{structure.layers[0]}.")]
    parts = mlps[0].parts if mlps else (0,)
    return LayerShape(
        hidden=model.config.hidden_size,
        intermediate=parts[0],
        queries=attention.heads * attention.head_dim,
        keys=attention.key_heads * attention.head_dim,
        is_gated=len(parts) > 1,
    )

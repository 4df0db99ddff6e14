"""Layer names for the accesses of a step.

An access lists its chunks, and a chunk's parameters name its layers. Layers common to all chunks of an access may have
run in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from patrickstar import _C


def layer_of(param_name: str) -> str:
    """Returns a parameter's layer: its module path up to the first number.

    ``transformer.h.3.attn.c_attn.weight`` -> ``transformer.h.3``; ``transformer.ln_f.weight`` -> ``transformer.ln_f``.
    """
    path = param_name.split(".")[:-1]
    numbered = next((index for index, part in enumerate(path) if part.isdigit()), len(path))
    return ".".join(path[: numbered + 1])


class ChunkLayers:
    """The layers in each chunk.

    Args:
        params_of_chunks: for each chunk its parameters' names, in memory order.
    """

    def __init__(self, params_of_chunks: Sequence[Sequence[str]]):
        self._layers = [tuple(dict.fromkeys(map(layer_of, names))) for names in params_of_chunks]

    def of_accesses(self, accesses: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
        """Returns, for each traced access, the layers that may have run in it, in order of registration; mostly one.

        A chunk of small parameters (biases, norms) belongs to many layers; neighbouring accesses narrow them down. A
        norm usually runs before the rest of its layer in forward and after it in backward. If that layer does not fit,
        the layer on the other side is used.
        """
        found = [self._of_chunks([chunk for chunk, _ in access["acquired"]]) for access in accesses]
        narrowed = list(found)
        for index, layers in enumerate(found):
            way = 1 if accesses[index]["phase"] == _C.Phase.FORWARD else -1
            rest, before = (_only(found, near) for near in (index + way, index - way))
            if len(layers) > 1 and rest in layers:
                narrowed[index] = (rest,)
            elif len(layers) > 1 and before in layers:
                narrowed[index] = layers[layers.index(before) :]
        return narrowed

    def _of_chunks(self, chunks: Sequence[int]) -> tuple[str, ...]:
        if not chunks:
            return ()
        found = [self._layers[chunk] for chunk in dict.fromkeys(chunks)]
        common = tuple(layer for layer in found[0] if all(layer in layers for layers in found))
        return common or tuple(dict.fromkeys(itertools.chain.from_iterable(found)))


def _only(found: Sequence[tuple[str, ...]], index: int) -> str | None:
    """Returns the layer of access ``index`` if it is unique."""
    return found[index][0] if 0 <= index < len(found) and len(found[index]) == 1 else None


def short_names(layers: Sequence[str]) -> str:
    """Returns a short label: the last parts of the first layer's name and of the last one's."""
    ends = [layers[0], layers[-1]] if len(layers) > 1 else list(layers)
    return "–".join(_short(layer) for layer in ends)


def _short(layer: str) -> str:
    parts = layer.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]

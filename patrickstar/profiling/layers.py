"""The names of layers for the moments of a step.

A moment knows which chunks it used. A chunk's parameters say which layers lie in it: those that all chunks of a moment
have in common are the layers that may have run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from patrickstar import _C


def layer_of(param_name: str) -> str:
    """The layer that a parameter belongs to: its module's path as far as the first number in it.

    ``transformer.h.3.attn.c_attn.weight`` is in ``transformer.h.3``, ``transformer.ln_f.weight`` in
    ``transformer.ln_f``.
    """
    path = param_name.split(".")[:-1]
    numbered = next((index for index, part in enumerate(path) if part.isdigit()), len(path))
    return ".".join(path[: numbered + 1])


class ChunkLayers:
    """Which layers lie in which chunk.

    Args:
        params_of_chunks: for each chunk the names of its parameters, in the order of their places.
    """

    def __init__(self, params_of_chunks: Sequence[Sequence[str]]):
        self._layers = [tuple(dict.fromkeys(map(layer_of, names))) for names in params_of_chunks]

    def of_moments(self, moments: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
        """For each traced moment the layers that may have run in it, in the order of registration; mostly one.

        A chunk of small parameters (biases, norms) has some of many layers, which the moments beside it narrow down: a
        norm mostly runs before the rest of its layer in forward and behind it in backward. Where it
        cannot be that one's, it comes after the layer on its other side.
        """
        found = [self._of_chunks([chunk for chunk, _ in moment["acquired"]]) for moment in moments]
        narrowed = list(found)
        for index, layers in enumerate(found):
            way = 1 if moments[index]["phase"] == _C.Phase.FORWARD else -1
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
    """The layer of the moment, where it is one."""
    return found[index][0] if 0 <= index < len(found) and len(found[index]) == 1 else None


def short_names(layers: Sequence[str]) -> str:
    """A label of a few letters: the last parts of the first name and, where there are several, of the last."""
    ends = [layers[0], layers[-1]] if len(layers) > 1 else list(layers)
    return "–".join(_short(layer) for layer in ends)


def _short(layer: str) -> str:
    parts = layer.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]
